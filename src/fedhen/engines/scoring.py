"""Scores models on the test set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedhen.data.dataset import Data
from fedhen.hardware.precision import FULL, Precision, search_convolutions
from fedhen.models.family import load_weights
from fedhen.params import Weights


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


CorrectCounts = list[tuple[int, int]]
"""For each reading, the number of examples that the exit, and the exits together, classify correctly."""
Score = Callable[[Sequence[Pass]], list[CorrectCounts]]
"""Scores models on the test set: passes -> the counts of each, in the same order."""


@dataclass(frozen=True)
class Scoring:
    """Scores models on the test set, one after the other."""

    modules: Mapping[str, nn.Module]
    """Tier -> a module, into which the weights are loaded."""
    data: Data
    batch_size: int = 0
    """0: 1000 on a GPU, 100 on a CPU, whose caches are small."""
    precision: Precision = FULL

    def __call__(self, passes: Sequence[Pass]) -> list[CorrectCounts]:
        return [self.score_batches(one, range(self.batches)) for one in passes]

    @property
    def size(self) -> int:
        """Examples in a batch."""
        return self.batch_size or (1000 if self.data.x_test.is_cuda else 100)

    @property
    def batches(self) -> int:
        """Batches in the test set."""
        return -(-len(self.data.y_test) // self.size)

    def score_batches(self, one: Pass, batches: range) -> CorrectCounts:
        """Scores a pass on some batches of the test set.

        Both counts of a reading are the same if it names no exits to take together.
        """
        data, module = self.data, self.modules[one.tier].eval()
        load_weights(module, one.weights)
        self.precision.choose()
        right = torch.zeros(len(one.readings), 2, dtype=torch.int64, device=data.y_test.device)
        with torch.no_grad(), self.precision.autocast(), search_convolutions(data.x_test.is_cuda):
            for number in batches:
                part = slice(number * self.size, (number + 1) * self.size)
                logits, labels = module(data.inputs(data.x_test[part])), data.y_test[part]
                for row, reading in enumerate(one.readings):
                    own = logits[reading.own].argmax(1)
                    together = mean_prediction(logits, reading.together) if reading.together else own
                    right[row, 0] += (own == labels).sum()
                    right[row, 1] += (together == labels).sum()
        return [(int(own), int(together)) for own, together in right]


def accuracy(module: nn.Module, data: Data, batch_size: int = 0) -> float:
    """Returns the share of the test set that the module's last exit classifies correctly."""
    [[(right, _)]] = Scoring({"": module}, data, batch_size)([Pass("", {})])
    return right / len(data.y_test)


def mean_prediction(logits: Sequence[Tensor], exits: Sequence[int]) -> Tensor:
    """Returns the most probable class by the mean of these exits' probabilities."""
    first, *others = (logits[k].softmax(1) for k in exits)
    return sum(others, first).argmax(1)
