"""Makes data from torch's Datasets: one that is split over the devices, or one for each device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedhen.data.arrays import read_arrays, read_devices
from fedhen.data.dataset import FederatedData
from fedhen.data.inputs import Inputs, list_tensors, map_tensors, shapes_of
from fedhen.errors import DataError

TARGETS = ("label", "labels", "target", "targets", "y")
"""What the target may be called in items that are mappings."""


def read_datasets(
    train: Any,
    test: Any,
    target: str,
    classes: int | None,
    class_names: Sequence[object] = (),
    normalisation: object = None,
) -> FederatedData:
    """See `FederatedData.from_datasets`."""
    x_test, y_test = (None, None) if test is None else _stack(test, "test data", target)
    about: dict[str, Any] = {"class_names": class_names, "normalisation": normalisation}
    if not _is_list_of_datasets(train):
        return read_arrays(*_stack(train, "training data", target), x_test, y_test, classes, **about)
    parts = [_stack(each, f"device {device}", target) for device, each in enumerate(train)]
    return read_devices(parts, x_test, y_test, classes, **about)


def _is_list_of_datasets(train: Any) -> bool:
    """Returns whether a list has Datasets, rather than the items of one."""
    is_list = isinstance(train, list | tuple)
    return is_list and (not train or not isinstance(train[0], tuple | Mapping | Tensor))


def _stack(dataset: Any, label: str, target: str) -> tuple[Inputs, Tensor]:
    """Returns all items as inputs and targets with a row for each."""
    items = [_read_item(item, f"{label}, item {place}", target) for place, item in enumerate(_iterate(dataset, label))]
    if not items:
        raise DataError(f"{label} has no items: give it some, or remove it")
    for place, item in enumerate(items):
        for what, found, first in zip(("inputs", "a target"), item, items[0], strict=True):
            if _shapes(found) != _shapes(first):
                raise DataError(
                    f"{label}: item {place} has {what} of shape {_shapes(found)}, item 0 of {_shapes(first)}: "
                    "they must agree"
                )
    columns = [torch.stack(tensors) for tensors in zip(*(list_tensors(x) for x, _ in items), strict=True)]
    stacked = iter(columns)
    return map_tensors(items[0][0], lambda _: next(stacked)), torch.stack([y for _, y in items])


def _iterate(dataset: Any, label: str) -> Iterator[Any]:
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        yield from (dataset[place] for place in range(len(dataset)))
    elif hasattr(dataset, "__iter__"):
        yield from dataset
    else:
        raise DataError(f"{label} is {type(dataset).__name__}: pass a Dataset, or a list with one for each device")


def _read_item(item: Any, label: str, target: str) -> tuple[Inputs, Tensor]:
    if isinstance(item, Mapping):
        name = target or next((name for name in TARGETS if name in item), "")
        if name not in item:
            wanted = repr(target) if target else f"target: name it with target=..., or call it {TARGETS[0]!r}"
            raise DataError(f"{label} has {', '.join(map(repr, item))} and no {wanted}")
        inputs: Any = {str(key): value for key, value in item.items() if key != name}
        x, y = inputs if len(inputs) > 1 else next(iter(inputs.values()), None), item[name]
    elif isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2:
        x, y = item
    else:
        raise DataError(f"{label} must be (x, y) or a mapping, found {type(item).__name__}")
    return _read_input(x, label), _read_tensor(y, f"{label}: the target")


def _read_input(x: Any, label: str) -> Inputs:
    if isinstance(x, Mapping):
        return {str(name): _read_tensor(each, f"{label}: input {name!r}") for name, each in x.items()}
    if isinstance(x, tuple) and any(isinstance(each, Tensor) for each in x):
        return tuple(_read_tensor(each, f"{label}: input {place}") for place, each in enumerate(x))
    return _read_tensor(x, f"{label}: the input")


def _read_tensor(value: Any, label: str) -> Tensor:
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"{label} is {type(value).__name__}: turn it into a tensor, as with a transform") from None
    # Python's floats become what torch's layers are made of.
    return found.float() if isinstance(value, float) else found


def _shapes(found: Inputs) -> Any:
    """Returns the shape of one item's tensor, or of each of several."""
    return shapes_of(map_tensors(found, lambda tensor: tensor[None]))
