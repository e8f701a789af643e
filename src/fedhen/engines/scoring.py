"""Scores models on the test set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedhen.data.dataset import Data, Index
from fedhen.data.inputs import call_module
from fedhen.hardware.precision import FULL, Precision, search_convolutions
from fedhen.models.family import load_weights
from fedhen.params import Weights
from fedhen.tasks import Task


class Reading(NamedTuple):
    """Which of a module's exits to score: one alone, and the mean prediction of several."""

    own: int = -1
    together: tuple[int, ...] = ()


LAST_EXIT = (Reading(),)


class Pass(NamedTuple):
    """One pass of the test set through the model of a tier, with the exits to score."""

    tier: str
    weights: Weights
    readings: Sequence[Reading] = LAST_EXIT
    held_out: bool = False
    """Whether to take the held-out training examples instead of the test set."""


BatchSums = list[list[Tensor]]
"""Reading -> what one batch adds to each metric: those of the exit, then that of the exits together."""
Score = Callable[[Sequence[Pass]], list[BatchSums]]
"""Scores models on the test set: passes -> the sums of each over all batches, in the same order."""


@dataclass(frozen=True)
class Scoring:
    """Scores models on the test set, one after the other."""

    modules: Mapping[str, nn.Module]
    """Tier -> a module, into which the weights are loaded."""
    data: Data
    task: Task
    batch_size: int = 0
    """0: 1000 on a GPU, 100 on a CPU, whose caches are small."""
    precision: Precision = FULL
    validation: Data | None = None
    """Data whose test examples are the held-out training examples."""

    def __call__(self, passes: Sequence[Pass]) -> list[BatchSums]:
        return [add_in_order(list(self.score_batches(one, range(self.count_batches(one))))) for one in passes]

    @property
    def size(self) -> int:
        """Examples in a batch."""
        return self.batch_size or (1000 if self.data.device.type == "cuda" else 100)

    def examples(self, one: Pass) -> Data:
        """Returns the data whose test examples a pass scores."""
        return self.validation if one.held_out and self.validation is not None else self.data

    def count_batches(self, one: Pass) -> int:
        return -(-len(self.examples(one).y_test) // self.size)

    def score_batches(self, one: Pass, batches: range) -> Iterator[BatchSums]:
        """Yields what each of these batches adds to the metrics."""
        data, module = self.examples(one), self.modules[one.tier].eval()
        load_weights(module, one.weights)
        self.precision.choose()
        for number in batches:
            with torch.no_grad(), self.precision.autocast(), search_convolutions(data.device.type == "cuda"):
                part = slice(number * self.size, (number + 1) * self.size)
                outputs, targets = call_module(module, data.test_inputs(part)), data.y_test[part]
                found = [self.read(outputs, targets, reading) for reading in one.readings]
            yield found

    def score_examples(self, module: nn.Module, index: Index) -> list[Tensor]:
        """Returns the sums of every metric of a module's last exit on these test examples; nothing if there are none.

        `module` is in evaluation mode, with its weights.
        """
        found: list[BatchSums] = []
        self.precision.choose()
        for begin in range(0, len(index), self.size):
            part = torch.from_numpy(index[begin : begin + self.size]).to(self.data.device)
            with torch.no_grad(), self.precision.autocast():
                outputs = call_module(module, self.data.test_inputs(part))
                found.append([self.read(outputs, self.data.y_test[part], Reading())])
        return add_in_order(found)[0] if found else []

    def read(self, outputs: Sequence[Tensor], targets: Tensor, reading: Reading) -> list[Tensor]:
        """Returns the sums of every metric of an exit and, if asked for, of the primary one of the exits together."""
        found = [metric.sums(outputs[reading.own], targets).double() for metric in self.task.scores]
        if reading.together:
            combined = self.task.combine([outputs[place] for place in reading.together])
            found.append(self.task.scores[0].sums(combined, targets).double())
        return found

    def evaluate(self, one: Pass) -> dict[str, float]:
        """Returns the metrics of a pass with one reading, by name."""
        [[sums]] = self([one])
        return {metric.name: metric.value(total) for metric, total in zip(self.task.scores, sums, strict=True)}


def add_in_order(batches: Sequence[BatchSums]) -> BatchSums:
    """Returns the sums of all batches, added in the order of the batches."""
    total, *others = batches
    for found in others:
        total = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(total, found, strict=True)]
    return total
