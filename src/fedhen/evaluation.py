"""Accuracy of models on the test set, and the average of all devices' last models, which the paper reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fedhen.algorithm.merging import Server, Update
from fedhen.data.dataset import Data
from fedhen.fixed_point import FixedPoint
from fedhen.params import Weights, pack, unpack
from fedhen.precision import FULL, Precision
from fedhen.shelf import Shelf


def accuracy(module: nn.Module, data: Data, batch_size: int) -> float:
    """The share of the test set that the module's last exit classifies rightly."""
    return scored(module, data, batch_size)[0]


def scored(
    module: nn.Module, data: Data, batch_size: int, together: Sequence[int] = (), precision: Precision = FULL
) -> tuple[float, float]:
    """The shares of the test set that the last exit, and the mean prediction of some exits together, classify rightly.

    A batch size of 0 is left to us. Without exits to take together both are the same.
    """
    batch_size = batch_size or (1000 if data.x_test.is_cuda else 100)
    module.eval()
    precision.choose()
    right = torch.zeros(2, dtype=torch.int64, device=data.y_test.device)
    with torch.no_grad(), precision.autocast():
        for x, y in zip(torch.split(data.x_test, batch_size), torch.split(data.y_test, batch_size), strict=True):
            logits = module(data.inputs(x))
            own = logits[-1].argmax(1)
            mean = (
                sum((logits[k].softmax(1) for k in together[1:]), logits[together[0]].softmax(1)) if together else None
            )
            right[0] += (own == y).sum()
            right[1] += ((own if mean is None else mean.argmax(1)) == y).sum()
    return int(right[0]) / len(data.y_test), int(right[1]) / len(data.y_test)


class NothingKept:
    """No device's last model is kept, and none is reported."""

    def __init__(self) -> None:
        self.rows = Shelf()

    def take(self, updates: Iterable[Update]) -> None:
        """Keep nothing."""

    def models(self) -> dict[str, Server]:
        """No kind of model."""
        return {}


class LastModels(NothingKept):
    """Reporting Results, "average all devices": the mean over a tier's devices of the model each trained last.

    A device that has not trained yet counts with the initial model. For reporting only: training never sees it. A
    running sum of whole numbers is exact: no rounding piles up over the rounds, and no order shows.
    """

    def __init__(self, initial: Server, tier_of: Sequence[str], rows: Shelf | None = None) -> None:
        self.initial = initial
        self.tier_of = tier_of
        self.rows = Shelf() if rows is None else rows
        sizes = Counter(tier_of)
        self.fixed = {tier: FixedPoint(weights, sizes[tier]) for tier, weights in initial.items()}
        self.start = {tier: self.fixed[tier].of(pack(weights)) for tier, weights in initial.items()}
        self.moved: dict[str, Tensor] = {}
        """Of each tier that has trained, by how much its devices' models differ from the initial one, all together."""

    def take(self, updates: Iterable[Update]) -> None:
        """Remember a round's trained models; a device that was left out keeps its old row."""
        for update in updates:
            device, tier = update.device, update.tier
            vector = pack({name: update.weights[name] for name in self.initial[tier]})
            fixed = self.fixed[tier].of
            before = fixed(self.rows.vector(device)) if device in self.rows else self.start[tier]
            step = fixed(vector) - before
            self.moved[tier] = self.moved[tier].add_(step) if tier in self.moved else step
            self.rows.put(device, vector, self.initial[tier])

    def average(self, tier: str) -> Weights:
        """The reported model of a tier."""
        if tier not in self.moved:
            return self.initial[tier]
        fixed = self.fixed[tier]
        return unpack(fixed.mean(self.start[tier] * fixed.devices + self.moved[tier]), self.initial[tier])

    def models(self) -> dict[str, Server]:
        """The reported models, as one more kind beside the server's."""
        return {"devices": {tier: self.average(tier) for tier in self.initial}}
