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
    """Which of a module's exits to score: one by itself, and some together."""

    own: int = -1
    together: tuple[int, ...] = ()


LAST_EXIT = (Reading(),)


class Pass(NamedTuple):
    """The test set through the model of a tier, of whose exits some are read."""

    tier: str
    weights: Weights
    readings: Sequence[Reading] = LAST_EXIT


Right = list[tuple[int, int]]
"""For each reading, how many examples the exit, and the mean prediction of several, classify rightly."""
Score = Callable[[Sequence[Pass]], list[Right]]
"""Whoever scores models on the test set."""


@dataclass(frozen=True)
class Scoring:
    """Scores models on the test set, one after the other."""

    modules: Mapping[str, nn.Module]
    """One of each tier, to score weights in."""
    data: Data
    batch_size: int = 0
    """0: 1000 on a GPU, 100 on a CPU, whose caches are small."""
    precision: Precision = FULL

    def __call__(self, passes: Sequence[Pass]) -> list[Right]:
        """Score every pass."""
        return [self.part(one, range(self.batches)) for one in passes]

    @property
    def size(self) -> int:
        """The number of examples in a batch."""
        return self.batch_size or (1000 if self.data.x_test.is_cuda else 100)

    @property
    def batches(self) -> int:
        """The number of batches in the test set."""
        return -(-len(self.data.y_test) // self.size)

    def part(self, one: Pass, batches: range) -> Right:
        """Score a pass on some batches of the test set. Counts add up to the same, however the batches are dealt.

        Without exits to take together both counts are the same.
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
    """The share of the test set that the module's last exit classifies rightly."""
    [[(right, _)]] = Scoring({"": module}, data, batch_size)([Pass("", {})])
    return right / len(data.y_test)


def mean_prediction(logits: Sequence[Tensor], exits: Sequence[int]) -> Tensor:
    """The class that the mean of these exits' probabilities names."""
    first, *others = (logits[k].softmax(1) for k in exits)
    return sum(others, first).argmax(1)
