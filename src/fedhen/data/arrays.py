"""Makes data from arrays: those of all devices together, or those of each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhen.data.dataset import FederatedData, Index
from fedhen.data.inputs import (
    Inputs,
    concatenate,
    count_examples,
    have_same_form,
    list_tensors,
    read_inputs,
    read_tensor,
    shapes_of,
    take,
)
from fedhen.data.spec import DataSpec, read_normalisation
from fedhen.errors import DataError


def read_arrays(
    x: object,
    y: object,
    x_test: object = None,
    y_test: object = None,
    classes: int | None = None,
    class_names: Sequence[object] = (),
    normalisation: object = None,
) -> FederatedData:
    """See `FederatedData.from_arrays`."""
    inputs, targets = read_inputs(x), _read_targets(y)
    if (x_test is None) != (y_test is None):
        raise DataError("test data needs both inputs and targets: pass x_test and y_test, or neither")
    test_inputs = take(inputs, slice(0)) if x_test is None else read_inputs(x_test)
    test_targets = targets[:0] if y_test is None else _read_targets(y_test)
    names = tuple(map(str, class_names))
    scale, about = read_normalisation(normalisation), DataSpec(class_names=names)
    if classes is None:
        counted = _count_classes(targets, test_targets)
        if names and counted > len(names):
            raise DataError(
                f"class_names has {len(names)} names, and there are {counted} classes: give each class a name"
            )
        classes = len(names) if names and counted else counted
    if names and classes and len(names) != classes:
        raise DataError(f"class_names has {len(names)} names, and there are {classes} classes: give each class a name")
    return FederatedData(inputs, targets, test_inputs, test_targets, classes, normalisation=scale, about=about)


def read_devices(
    devices: Sequence[Sequence[object]],
    x_test: object = None,
    y_test: object = None,
    classes: int | None = None,
    class_names: Sequence[object] = (),
    normalisation: object = None,
) -> FederatedData:
    """See `FederatedData.from_devices`."""
    parts = [_read_device(number, given) for number, given in enumerate(devices)]
    if not parts:
        raise DataError("there are no devices: give at least one (x, y)")
    for kind, place in (("inputs", 0), ("targets", 1), ("test inputs", 2), ("test targets", 3)):
        _check_same_form(kind, {device: part[place] for device, part in enumerate(parts) if len(part) > place})
    ends = np.cumsum([len(y) for _, y, *_ in parts])
    shards = [np.arange(end - len(y), end, dtype=np.int64) for end, (_, y, *_) in zip(ends, parts, strict=True)]
    tests = [part[2:] for part in parts if len(part) == 4]
    test_shards: list[Index] = []
    if tests and x_test is None:
        sizes = [len(part[3]) if len(part) == 4 else 0 for part in parts]
        test_shards = [np.arange(end - n, end, dtype=np.int64) for end, n in zip(np.cumsum(sizes), sizes, strict=True)]
        x_test, y_test = concatenate([test[0] for test in tests]), torch.cat([test[1] for test in tests])
    x, y = concatenate([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return read_arrays(x, y, x_test, y_test, classes, class_names, normalisation).split(shards, test_shards)


def _check_same_form(kind: str, by_device: Mapping[int, Inputs]) -> None:
    """Raises a DataError unless all devices have arrays of the same form."""
    for device, found in by_device.items():
        first = next(iter(by_device))
        if not have_same_form(found, by_device[first]):
            here, there = shapes_of(found), shapes_of(by_device[first])
            raise DataError(
                f"device {device} has {kind} of shape {here}, device {first} of shape {there}: they must agree"
            )


def _read_device(device: int, given: Sequence[object]) -> tuple[Any, ...]:
    if len(given) not in (2, 4):
        raise DataError(f"device {device} has {len(given)} arrays: give (x, y) or (x, y, x_test, y_test)")
    parts = [_read_targets(each) if place % 2 else read_inputs(each) for place, each in enumerate(given)]
    for x, y in zip(parts[::2], parts[1::2], strict=True):
        if count_examples(x) != len(list_tensors(y)[0]):
            number, targets = count_examples(x), count_examples(y)
            raise DataError(f"device {device} has {number} inputs and {targets} targets: it needs as many of each")
    if not count_examples(parts[0]):
        raise DataError(f"device {device} has no data: give it examples, or remove it")
    return tuple(parts)


def _read_targets(y: object) -> Tensor:
    targets = read_tensor(y, "targets")
    return targets if targets.is_floating_point() or targets.dtype == torch.bool else targets.long()


def _count_classes(*targets: Tensor) -> int:
    """Returns one more than the largest label; 0 if targets are not one whole number for each example."""
    if any(y.dim() != 1 or y.dtype != torch.int64 for y in targets):
        return 0
    return 1 + max((int(y.max()) for y in targets if len(y)), default=0)
