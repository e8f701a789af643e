"""The average of all devices' last models, which the paper reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from fedhen.algorithm.updates import Update
from fedhen.devices.state_store import StateStore
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.exact_sums import FixedPoint
from fedhen.params import TierModels, Weights, pack, unpack


class NoReportedModels:
    """No device's last model is kept, and none is reported."""

    def __init__(self) -> None:
        self.rows = StateStore()

    def take(self, updates: Iterable[Update], trained: Collection[int] = ()) -> None:
        """Keep nothing."""

    def restore(self, device: int, vector: Tensor | None) -> None:
        """Nothing was kept."""

    def models(self) -> dict[str, TierModels]:
        """No kind of model."""
        return {}


class AllDevicesAverage(NoReportedModels):
    """Reporting Results, "average all devices": the mean over a tier's devices of the model each trained last.

    A device that has not trained yet counts with the initial model. For reporting only: training never sees it. A
    running sum of whole numbers is exact: no rounding piles up over the rounds, and no order shows.
    """

    def __init__(
        self, initial: TierModels, tier_of: Sequence[str], rows: StateStore | None = None, ranks: Ranks = ALONE
    ) -> None:
        self.initial, self.ranks = initial, ranks
        self.tier_of = tier_of
        self.rows = StateStore() if rows is None else rows
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

    def models(self) -> dict[str, TierModels]:
        """The reported models, as one more kind beside the server's."""
        return {"devices": {tier: self.average(tier) for tier in self.initial}}
