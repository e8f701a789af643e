"""Accuracy of models on the test set, and the average of all devices' last models, which the paper reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedhen.algorithm.merging import Server, Update
from fedhen.data.dataset import Data
from fedhen.fixed_point import FixedPoint
from fedhen.models.nesting import load_weights
from fedhen.params import Weights, pack, unpack
from fedhen.precision import FULL, Precision, searching
from fedhen.ranks import ALONE, Ranks
from fedhen.shelf import Shelf


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
        with torch.no_grad(), self.precision.autocast(), searching(data.x_test.is_cuda):
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


class NothingKept:
    """No device's last model is kept, and none is reported."""

    def __init__(self) -> None:
        self.rows = Shelf()

    def take(self, updates: Iterable[Update], trained: Collection[int] = ()) -> None:
        """Keep nothing."""

    def restore(self, device: int, vector: Tensor | None) -> None:
        """Nothing was kept."""

    def models(self) -> dict[str, Server]:
        """No kind of model."""
        return {}


class LastModels(NothingKept):
    """Reporting Results, "average all devices": the mean over a tier's devices of the model each trained last.

    A device that has not trained yet counts with the initial model. For reporting only: training never sees it. A
    running sum of whole numbers is exact: no rounding piles up over the rounds, and no order shows.
    """

    def __init__(
        self, initial: Server, tier_of: Sequence[str], rows: Shelf | None = None, ranks: Ranks = ALONE
    ) -> None:
        self.initial, self.ranks = initial, ranks
        self.tier_of = tier_of
        self.rows = Shelf() if rows is None else rows
        sizes = Counter(tier_of)
        self.fixed = {tier: FixedPoint(weights, sizes[tier]) for tier, weights in initial.items()}
        self.start = {tier: self.fixed[tier].of(pack(weights)) for tier, weights in initial.items()}
        self.moved = {tier: torch.zeros_like(start) for tier, start in self.start.items()}
        """By how much the models of the devices that this rank has rows of differ from the initial one, together."""
        self.trained: set[str] = set()
        """The tiers of which some device has trained, on whatever rank."""

    def take(self, updates: Iterable[Update], trained: Collection[int] = ()) -> None:
        """Remember a round's trained models; a device that was left out keeps its old row.

        `trained` are the devices of all ranks that have a new model: what this rank has of another's is out of date.
        """
        own = {update.device: update for update in updates}
        for device in {*own, *trained}:
            tier = self.tier_of[device]
            self.trained.add(tier)
            if device in own:
                self._put(device, pack({name: own[device].weights[name] for name in self.initial[tier]}))
            elif device in self.rows:
                self.moved[tier] += self.start[tier] - self._before(device)
                del self.rows[device]

    def restore(self, device: int, vector: Tensor | None) -> None:
        """Put a saved row back, or only know that another rank has it.

        The running sum is a function of the rows and the initial models, and whole numbers add up to the same in any
        order: with all rows back it is what it was, so that a checkpoint need not hold it.
        """
        self.trained.add(self.tier_of[device])
        if vector is not None:
            self._put(device, vector)

    def _put(self, device: int, vector: Tensor) -> None:
        tier = self.tier_of[device]
        self.moved[tier] += self.fixed[tier].of(vector)
        self.moved[tier] -= self._before(device)
        self.rows.put(device, vector, self.initial[tier])

    def _before(self, device: int) -> Tensor:
        tier = self.tier_of[device]
        return self.fixed[tier].of(self.rows.vector(device)) if device in self.rows else self.start[tier]

    def average(self, tier: str) -> Weights:
        """The reported model of a tier."""
        if tier not in self.trained:
            return self.initial[tier]
        fixed, moved = self.fixed[tier], self.ranks.total(self.moved[tier])
        return unpack(fixed.mean(self.start[tier] * fixed.devices + moved), self.initial[tier])

    def models(self) -> dict[str, Server]:
        """The reported models, as one more kind beside the server's."""
        return {"devices": {tier: self.average(tier) for tier in self.initial}}
