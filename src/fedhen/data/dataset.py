"""A data set as tensors in memory: the examples that devices train on and that models are scored on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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

    A device of a real fleet has no test examples. Images may be stored as bytes, with a normalisation that is applied
    to each batch. Without a normalisation, inputs are passed to the models unchanged.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    shards: tuple[Index, ...] = ()
    normalisation: Normalisation | None = None
    dtype: torch.dtype = torch.float32
    """The type of normalised inputs."""

    def __post_init__(self) -> None:
        for name, x, y in (("training", self.x, self.y), ("test", self.x_test, self.y_test)):
            if len(x) != len(y) or y.dim() != 1:
                raise UserError(
                    f"{name} data: {len(x)} inputs need as many labels, found labels of shape {tuple(y.shape)}"
                )
            if not len(y):
                if name == "test":
                    continue
                raise UserError(f"{name} data: it has no examples")
            if int(y.min()) < 0 or int(y.max()) >= self.classes:
                wrong = int(y.max()) if int(y.max()) >= self.classes else int(y.min())
                raise UserError(f"{name} data: label {wrong} is out of range, labels must be 0 to {self.classes - 1}")
        if self.x.shape[1:] != self.x_test.shape[1:]:
            raise UserError(
                f"training inputs have shape {tuple(self.x.shape[1:])}, test inputs {tuple(self.x_test.shape[1:])}: "
                "they must agree"
            )
        for device, shard in enumerate(self.shards):
            if not len(shard):
                raise UserError(f"device {device} has no data: give it examples, or remove it")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])

    def to(self, accelerator: torch.device) -> Data:
        """Returns the same data on an accelerator."""
        moved = {name: getattr(self, name).to(accelerator) for name in ("x", "y", "x_test", "y_test")}
        return replace(self, **moved)

    def in_type_of(self, module: nn.Module) -> Data:
        """Returns the same data with inputs of the floating-point type of a module's weights."""
        kinds = [p.dtype for p in module.parameters() if p.is_floating_point()]
        if not kinds or not self.x.is_floating_point():
            return replace(self, dtype=kinds[0]) if kinds else self
        return replace(self, x=self.x.to(kinds[0]), x_test=self.x_test.to(kinds[0]), dtype=kinds[0])

    def inputs(self, x: Tensor) -> Tensor:
        """Returns a batch of stored examples as the models' inputs."""
        return x if self.normalisation is None else self.normalisation(x).to(self.dtype)

    def present(self, device: int) -> Tensor:
        """Returns a mask of the classes that a device holds."""
        found = torch.zeros(self.classes, dtype=torch.bool, device=self.y.device)
        found[self.y[self.shards[device]]] = True
        return found

    def split(self, shards: Sequence[Index]) -> Data:
        """Returns the same data with these shards."""
        return replace(self, shards=tuple(shards))


def arrays(x: object, y: object, x_test: object, y_test: object, classes: int | None = None) -> Data:
    """Makes data from arrays or tensors, to be split over the devices; `classes` follows from the labels by default."""
    inputs, test_inputs = (_tensor(v, "inputs") for v in (x, x_test))
    labels, test_labels = (_labels(v) for v in (y, y_test))
    if classes is None:
        classes = 1 + max((int(v.max()) for v in (labels, test_labels) if len(v)), default=0)
    return Data(inputs, labels, test_inputs, test_labels, classes)


def per_device(
    devices: Sequence[tuple[object, object]], x_test: object, y_test: object, classes: int | None = None
) -> Data:
    """Makes data that is already split: one (x, y) per device, in order."""
    parts = [(_tensor(x, "inputs"), _labels(y)) for x, y in devices]
    if not parts:
        raise UserError("there are no devices: give at least one (x, y)")
    for device, (x, y) in enumerate(parts):
        if len(x) != len(y):
            raise UserError(f"device {device} has {len(x)} inputs and {len(y)} labels: it needs as many of each")
        if not len(x):
            raise UserError(f"device {device} has no data: give it examples, or remove it")
        if x.shape[1:] != parts[0][0].shape[1:]:
            here, there = tuple(x.shape[1:]), tuple(parts[0][0].shape[1:])
            raise UserError(f"device {device} has inputs of shape {here}, device 0 of shape {there}: they must agree")
    ends = np.cumsum([len(x) for x, _ in parts])
    shards = [np.arange(end - len(x), end, dtype=np.int64) for end, (x, _) in zip(ends, parts, strict=True)]
    x, y = (torch.cat([part[k] for part in parts]) for k in (0, 1))
    return arrays(x, y, x_test, y_test, classes).split(shards)


def _tensor(values: object, kind: str) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the {kind} are not an array of numbers: {str(error).splitlines()[0]}") from None
    if not tensor.dim():
        raise UserError(f"the {kind} are a single number: pass an array")
    return tensor


def _labels(y: object) -> Tensor:
    labels = _tensor(y, "labels")
    if len(labels) and (labels.is_floating_point() or labels.dtype == torch.bool):
        raise UserError(f"labels must be whole numbers, found {str(labels.dtype).removeprefix('torch.')}")
    return labels.long()
