"""Accuracy of models on the test set, and the average of all devices' last models, which the paper reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedhen.algorithm.merging import Server, Update
from fedhen.data.dataset import Data
from fedhen.params import Average, Weights, shapes_of
from fedhen.precision import FULL, Precision


def accuracy(module: nn.Module, data: Data, batch_size: int) -> float:
    """The share of the test set that the module's last exit classifies rightly."""
    return scored(module, data, batch_size)[0][0]


@dataclass(frozen=True)
class Reading:
    """Which of a module's exits to score: one by itself, and some together."""

    own: int = -1
    together: tuple[int, ...] = ()


def scored(
    module: nn.Module,
    data: Data,
    batch_size: int,
    readings: Sequence[Reading] = (Reading(),),
    precision: Precision = FULL,
) -> list[tuple[float, float]]:
    """For each reading, the shares of the test set that the exit, and the mean prediction of several, classify rightly.

    A batch size of 0 is left to us. Without exits to take together both are the same.
    """
    batch_size = batch_size or default_batch_size(data)
    module.eval()
    precision.choose()
    right = torch.zeros(len(readings), 2, dtype=torch.int64, device=data.y_test.device)
    with torch.no_grad(), precision.autocast():
        for x, y in zip(torch.split(data.x_test, batch_size), torch.split(data.y_test, batch_size), strict=True):
            logits = module(data.inputs(x))
            for row, reading in enumerate(readings):
                own = logits[reading.own].argmax(1)
                right[row, 0] += (own == y).sum()
                right[row, 1] += ((mean_prediction(logits, reading.together) if reading.together else own) == y).sum()
    return [(int(own) / len(data.y_test), int(together) / len(data.y_test)) for own, together in right]


def mean_prediction(logits: Sequence[Tensor], exits: Sequence[int]) -> Tensor:
    """The class that the mean of these exits' probabilities names."""
    first, *others = (logits[k].softmax(1) for k in exits)
    return sum(others, first).argmax(1)


def default_batch_size(data: Data) -> int:
    """A CPU's caches are small."""
    return 1000 if data.x_test.is_cuda else 100


class LastModels:
    """Reporting Results, "average all devices": the mean over a tier's devices of the model each trained last.

    A device that has not trained yet counts with the initial model. For reporting only: training never sees it. The
    mean is taken anew each time, in the order of the devices, so that no rounding piles up over the rounds.
    """

    def __init__(self, initial: Server, tier_of: Sequence[str]) -> None:
        self.initial = initial
        self.tier_of = tier_of
        self.rows: dict[int, Weights] = {}

    def take(self, updates: Iterable[Update]) -> None:
        """Remember a round's trained models; a device that was left out keeps its old row."""
        for update in updates:
            self.rows[update.device] = update.weights

    def average(self, tier: str) -> Weights:
        """The reported model of a tier."""
        initial = self.initial[tier]
        mean = Average(shapes_of(initial))
        rows = [self.rows[device] for device in sorted(self.rows) if self.tier_of[device] == tier]
        for row in rows:
            mean.add(row)
        if never := self.tier_of.count(tier) - len(rows):
            mean.add(initial, never)
        return mean.finish(otherwise=initial)
