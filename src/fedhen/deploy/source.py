"""What is exported: trained modules, the examples they are checked on, and what a device has to know of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedhen import seeds
from fedhen.data.inputs import Inputs, count_examples, list_tensors, map_tensors, take
from fedhen.data.spec import DataSpec, Normalisation
from fedhen.deploy.manifest import InputRecord
from fedhen.errors import FedhenError
from fedhen.tasks import Task

RANDOM_EXAMPLES = 64
"""Examples that are made up where there is no test data."""
CALIBRATION = 200
"""Training examples that int8 is calibrated on."""


@dataclass(frozen=True)
class TierModel:
    """The trained model of a tier."""

    tier: str
    module: nn.Module
    """It takes prepared inputs and returns the outputs of its exits, shallowest first."""
    exits: tuple[str, ...]
    """The tiers that its exits are named after."""
    sha256: str = ""
    """Of the weights."""
    round: int = 0
    """The round that it is of; 0 if that is not known."""


@dataclass(frozen=True)
class Source:
    """The models of a run and the data that their files are checked on. Inputs are raw, as a device has them."""

    models: Sequence[TierModel]
    """Shallowest first."""
    task: Task
    sample: Inputs
    """At least two examples."""
    test: Inputs | None = None
    targets: Tensor | None = None
    training: Inputs | None = None
    prepare: Callable[[Inputs], Inputs] | None = None
    """What turns raw inputs into a module's; it becomes part of the file."""
    normalisation: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """`mean` and `std` of `prepare`, for the manifest."""
    classes: Sequence[str] = ()
    """Names of the classes, or the words of a vocabulary."""
    spec: DataSpec | None = None
    """What raw inputs are; None if the run did not record it."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """What identifies the run: recipe, method, seed, rounds, whose models."""

    @property
    def has_test(self) -> bool:
        return self.test is not None and count_examples(self.test) > 0

    @property
    def examples(self) -> Inputs:
        """The examples that files are checked on: the test set, or made-up ones."""
        return self.test if self.has_test else make_up_examples(self.sample)

    @property
    def inputs(self) -> list[InputRecord]:
        """What a device gives."""
        return describe_inputs(self.sample)

    @property
    def calibration(self) -> list[Tensor]:
        """Training examples to calibrate int8 on. Raises a FedhenError if there are none."""
        if self.training is None or not count_examples(self.training):
            raise FedhenError("int8 needs training examples to calibrate on: give the run's data")
        return take_examples(self.training, slice(CALIBRATION))


class Normalise(nn.Module):
    """A normalisation as a module, so that it becomes part of a file."""

    mean: Tensor
    std: Tensor

    def __init__(self, normalisation: Normalisation) -> None:
        super().__init__()
        for name, values in (("mean", normalisation.mean), ("std", normalisation.std)):
            self.register_buffer(name, torch.tensor(values))

    def forward(self, inputs: Inputs) -> Inputs:
        def normalise(x: Tensor) -> Tensor:
            shape = (1, -1, *[1] * (x.dim() - 2))
            return (x.float() - self.mean.view(shape)) / self.std.view(shape)

        return map_tensors(inputs, normalise)


def make_up_examples(sample: Inputs) -> Inputs:
    """Returns random examples of the form of a sample, with whole numbers from its range."""
    rng = torch.Generator().manual_seed(seeds.number(0, "made-up examples"))

    def draw(like: Tensor) -> Tensor:
        shape = (RANDOM_EXAMPLES, *like.shape[1:])
        if like.is_floating_point():
            return torch.randn(shape, generator=rng, dtype=like.dtype)
        most = 255 if like.dtype == torch.uint8 else int(like.max()) if like.numel() else 0
        return torch.randint(0, most + 1, shape, generator=rng).to(like.dtype)

    return map_tensors(sample, draw)


def name_inputs(inputs: Inputs) -> tuple[str, ...]:
    """Returns the names that a file has for its inputs: a mapping's, or `input`, or `input_0` and so on."""
    if isinstance(inputs, Mapping):
        return tuple(inputs)
    number = len(list_tensors(inputs))
    return ("input",) if isinstance(inputs, Tensor) else tuple(f"input_{k}" for k in range(number))


def describe_inputs(inputs: Inputs, batch: int = 0) -> list[InputRecord]:
    """Returns name, type and shape of each input."""
    pairs = zip(name_inputs(inputs), list_tensors(inputs), strict=True)
    return [
        InputRecord(name=name, type=str(t.dtype).removeprefix("torch."), shape=list(t.shape[1:]), batch=batch)
        for name, t in pairs
    ]


def take_examples(inputs: Inputs, index: Tensor | slice) -> list[Tensor]:
    """Returns some examples as a list of tensors, in the order of their names."""
    return [tensor.contiguous() for tensor in list_tensors(take(inputs, index))]
