"""A data set as tensors in memory: the examples that devices train on and that models are scored on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedhen.data.inputs import (
    Inputs,
    concatenate,
    count_examples,
    have_same_form,
    list_tensors,
    map_tensors,
    read_inputs,
    read_tensor,
    shape_of,
    shapes_of,
    take,
)
from fedhen.errors import UserError

Index = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Normalisation:
    """(x − mean) / std for each channel, in units of the stored pixels."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises a batch (n, channels, height, width)."""
        shape = (1, -1, 1, 1)
        mean, std = (torch.tensor(v, device=x.device).view(shape) for v in (self.mean, self.std))
        return (x.float() - mean) / std


@dataclass(frozen=True)
class Data:
    """Training and test examples. `shards`, if given, are the training examples of each device.

    Inputs are a tensor, or a mapping or tuple of tensors; targets are a tensor with a row for each example. There may
    be no test examples: a device of a real fleet has none. Images may be stored as bytes, with a normalisation that is
    applied to each batch. Without a normalisation, inputs are passed to the models unchanged.
    """

    x: Inputs
    y: Tensor
    x_test: Inputs
    y_test: Tensor
    classes: int
    """The number of classes, if targets are the class of each example; else 0."""
    shards: tuple[Index, ...] = ()
    normalisation: Normalisation | None = None
    dtype: torch.dtype = torch.float32
    """The type of normalised inputs."""

    def __post_init__(self) -> None:
        for name, x, y in (("training", self.x, self.y), ("test", self.x_test, self.y_test)):
            if count_examples(x) != len(y):
                raise UserError(
                    f"{name} data: {count_examples(x)} inputs need as many targets, "
                    f"found targets of shape {tuple(y.shape)}"
                )
        if not len(self.y):
            raise UserError("training data: it has no examples")
        if not have_same_form(self.x, self.x_test):
            raise UserError(
                f"training inputs have shape {shapes_of(self.x)}, test inputs {shapes_of(self.x_test)}: they must agree"
            )
        if self.y.shape[1:] != self.y_test.shape[1:]:
            raise UserError(
                f"training targets have shape {tuple(self.y.shape[1:])}, test targets {tuple(self.y_test.shape[1:])}: "
                "they must agree"
            )
        for device, shard in enumerate(self.shards):
            if not len(shard):
                raise UserError(f"device {device} has no data: give it examples, or remove it")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input; of several tensors, that of the first."""
        return shape_of(self.x)

    @property
    def device(self) -> torch.device:
        """Where the data lies."""
        return self.y.device

    def to(self, accelerator: torch.device) -> Data:
        """Returns the same data on an accelerator."""
        return self._map(lambda tensor: tensor.to(accelerator))

    def in_type_of(self, module: nn.Module) -> Data:
        """Returns the same data, with what is floating-point in the type of a module's weights."""
        kind = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        if kind is None:
            return self
        return replace(self._map(lambda t: t.to(kind) if t.is_floating_point() else t), dtype=kind)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Data:
        x, x_test = (map_tensors(inputs, change) for inputs in (self.x, self.x_test))
        return replace(self, x=x, y=change(self.y), x_test=x_test, y_test=change(self.y_test))

    def inputs(self, index: Tensor | slice) -> Inputs:
        """Returns training examples as the models' inputs."""
        return self._normalise(take(self.x, index))

    def test_inputs(self, index: Tensor | slice) -> Inputs:
        """Returns test examples as the models' inputs."""
        return self._normalise(take(self.x_test, index))

    def sample(self) -> tuple[Inputs, Tensor]:
        """Returns two training examples, for trials of models."""
        return self.inputs(slice(2)), self.y[:2]

    def _normalise(self, x: Inputs) -> Inputs:
        if self.normalisation is None:
            return x
        normalise = self.normalisation
        return map_tensors(x, lambda tensor: normalise(tensor).to(self.dtype))

    def present(self, device: int) -> Tensor:
        """Returns a mask of the classes that a device holds."""
        found = torch.zeros(self.classes, dtype=torch.bool, device=self.y.device)
        found[self.y[self.shards[device]]] = True
        return found

    def split(self, shards: Sequence[Index]) -> Data:
        """Returns the same data with these shards."""
        return replace(self, shards=tuple(shards))


def arrays(x: object, y: object, x_test: object = None, y_test: object = None, classes: int | None = None) -> Data:
    """Makes data from arrays or tensors, to be split over the devices.

    Args:
        x: The training inputs: an array, or a mapping or tuple of arrays, with a row for each example.
        y: The training targets, with a row for each example.
        x_test, y_test: The test data. Without them models are not scored.
        classes: The number of classes. By default it follows from the labels.
    """
    inputs, targets = read_inputs(x), _read_targets(y)
    if (x_test is None) != (y_test is None):
        raise UserError("test data needs both inputs and targets: pass x_test and y_test, or neither")
    test_inputs = take(inputs, slice(0)) if x_test is None else read_inputs(x_test)
    test_targets = targets[:0] if y_test is None else _read_targets(y_test)
    if classes is None:
        classes = _count_classes(targets, test_targets)
    return Data(inputs, targets, test_inputs, test_targets, classes)


def per_device(
    devices: Sequence[Sequence[object]], x_test: object = None, y_test: object = None, classes: int | None = None
) -> Data:
    """Makes data that is already split: one (x, y) for each device, in order.

    A device may bring test data, as (x, y, x_test, y_test). If `x_test` and `y_test` are not given, models are scored
    on the test data of all devices together.
    """
    parts = [_read_device(number, given) for number, given in enumerate(devices)]
    if not parts:
        raise UserError("there are no devices: give at least one (x, y)")
    for device, (x, *_) in enumerate(parts):
        if not have_same_form(x, parts[0][0]):
            here, there = shapes_of(x), shapes_of(parts[0][0])
            raise UserError(f"device {device} has inputs of shape {here}, device 0 of shape {there}: they must agree")
    ends = np.cumsum([len(y) for _, y, *_ in parts])
    shards = [np.arange(end - len(y), end, dtype=np.int64) for end, (_, y, *_) in zip(ends, parts, strict=True)]
    tests = [part[2:] for part in parts if len(part) == 4]
    if tests and x_test is None:
        x_test, y_test = concatenate([test[0] for test in tests]), torch.cat([test[1] for test in tests])
    x, y = concatenate([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return arrays(x, y, x_test, y_test, classes).split(shards)


def _read_device(device: int, given: Sequence[object]) -> tuple[Any, ...]:
    if len(given) not in (2, 4):
        raise UserError(f"device {device} has {len(given)} arrays: give (x, y) or (x, y, x_test, y_test)")
    parts = [_read_targets(each) if place % 2 else read_inputs(each) for place, each in enumerate(given)]
    for x, y in zip(parts[::2], parts[1::2], strict=True):
        if count_examples(x) != len(list_tensors(y)[0]):
            number, targets = count_examples(x), count_examples(y)
            raise UserError(f"device {device} has {number} inputs and {targets} targets: it needs as many of each")
    if not count_examples(parts[0]):
        raise UserError(f"device {device} has no data: give it examples, or remove it")
    return tuple(parts)


def _read_targets(y: object) -> Tensor:
    targets = read_tensor(y, "targets")
    return targets if targets.is_floating_point() or targets.dtype == torch.bool else targets.long()


def _count_classes(*targets: Tensor) -> int:
    """Returns one more than the largest label; 0 if targets are not one whole number for each example."""
    if any(y.dim() != 1 or y.dtype != torch.int64 for y in targets):
        return 0
    return 1 + max((int(y.max()) for y in targets if len(y)), default=0)
