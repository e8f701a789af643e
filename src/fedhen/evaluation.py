"""Accuracy of models on the test set, and the average of all devices' last models, which the paper reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedhen.algorithm.merging import Server, Update
from fedhen.data.dataset import Data
from fedhen.fixed_point import FixedPoint
from fedhen.params import Weights, pack, unpack
from fedhen.precision import FULL, Precision
from fedhen.ranks import ALONE, Ranks
from fedhen.shelf import Shelf


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
    # The same shapes again and again are worth a search for their fastest convolutions.
    torch.backends.cudnn.benchmark = data.x_test.is_cuda
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
            if device in self.rows:
                self.moved[tier] -= self.fixed[tier].of(self.rows.vector(device))
                self.moved[tier] += self.start[tier]
            if device in own:
                self._put(device, pack({name: own[device].weights[name] for name in self.initial[tier]}))
            elif device in self.rows:
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
        self.moved[tier] -= self.start[tier]
        self.rows.put(device, vector, self.initial[tier])

    def average(self, tier: str) -> Weights:
        """The reported model of a tier."""
        if tier not in self.trained:
            return self.initial[tier]
        fixed, moved = self.fixed[tier], self.ranks.total(self.moved[tier])
        return unpack(fixed.mean(self.start[tier] * fixed.devices + moved), self.initial[tier])

    def models(self) -> dict[str, Server]:
        """The reported models, as one more kind beside the server's."""
        return {"devices": {tier: self.average(tier) for tier in self.initial}}
