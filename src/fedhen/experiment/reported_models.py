"""The average of all devices' last models, which the paper reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedhen.algorithm.updates import Update
from fedhen.devices.state_store import StateStore
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.exact_sums import FixedPoint, split_blocks
from fedhen.params import TierModels, Weights, pack, unpack


class ReportedModels(Protocol):
    """The models that are reported in addition to the server's, made from the devices' models."""

    rows: StateStore
    """The last model of each device that has trained on this rank."""

    def admit(self, tier_of: Sequence[str]) -> None: ...

    def take(self, updates: Iterable[Update], trained: Collection[int] = ()) -> None: ...

    def restore(self, device: int, vector: Tensor | None) -> None: ...

    def models(self) -> dict[str, TierModels]: ...


class NoReportedModels:
    """Keeps no device's model and reports none."""

    def __init__(self) -> None:
        self.rows = StateStore()

    def admit(self, tier_of: Sequence[str]) -> None:
        pass

    def take(self, updates: Iterable[Update], trained: Collection[int] = ()) -> None:
        pass

    def restore(self, device: int, vector: Tensor | None) -> None:
        pass

    def models(self) -> dict[str, TierModels]:
        return {}


def average_rows(initial: Weights, rows: Iterable[Tensor], devices: int) -> Weights:
    """Returns the average of a tier's devices, as `AllDevicesAverage` does, from the last models of those that trained.

    `initial` are the weights that the others still have. One row at a time is in memory.
    """
    fixed = FixedPoint(initial, devices)
    start = fixed.of(pack(initial))
    total, trained = start * devices, False
    for row in rows:
        total += fixed.of(row) - start
        trained = True
    return unpack(fixed.mean(total), initial) if trained else initial


class AllDevicesAverage:
    """The paper's "Reporting Results": the mean, over a tier's devices, of the model that each trained last.

    A device that has not trained yet counts with the initial model. The average is only reported; training does not
    use it. It is a running sum of integers and therefore exact: rounding errors do not accumulate over the rounds, and
    the order of the devices does not matter.
    """

    def __init__(
        self,
        initial: TierModels,
        tier_of: Sequence[str],
        rows: StateStore | None = None,
        ranks: Ranks = ALONE,
        held_out: Collection[int] = (),
    ) -> None:
        self.initial, self.ranks = initial, ranks
        self.rows = StateStore() if rows is None else rows
        self.held_out = held_out
        self.trained: set[str] = set()
        """The tiers that have a device that has trained, on any rank."""
        self.admit(tier_of)

    def admit(self, tier_of: Sequence[str]) -> None:
        """Counts these devices from now on. Those that have joined count with the initial model."""
        self.tier_of = tier_of
        sizes = Counter(tier for device, tier in enumerate(tier_of) if device not in self.held_out)
        self.fixed = {tier: FixedPoint(weights, sizes[tier]) for tier, weights in self.initial.items()}
        self.start = {tier: self.fixed[tier].of(pack(weights)) for tier, weights in self.initial.items()}
        self.moved = {tier: torch.zeros_like(start) for tier, start in self.start.items()}
        """Tier -> the sum, over the rows on this rank, of the difference from the initial model."""
        for device in self.rows:
            self.moved[tier_of[device]] += self._before(device) - self.start[tier_of[device]]

    def take(self, updates: Iterable[Update], trained: Collection[int] = ()) -> None:
        """Stores a round's trained models. A device that was left out keeps its old row.

        `trained` names the devices of all ranks that have a new model. A row of this rank whose device has trained on
        another rank is out of date and is dropped.
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
        """Puts a saved row back. Without a vector, only notes that another rank has it.

        Checkpoints do not hold the running sum: integers add up to the same in any order, so restoring all rows
        restores the sum too.
        """
        self.trained.add(self.tier_of[device])
        if vector is not None:
            self._put(device, vector)

    def _put(self, device: int, vector: Tensor) -> None:
        tier = self.tier_of[device]
        fixed, moved, start = self.fixed[tier], self.moved[tier], self.start[tier]
        before = self.rows.vector(device) if device in self.rows else None
        for part in split_blocks(vector):
            moved[part].add_(fixed.of(vector, part))
            moved[part].sub_(start[part] if before is None else fixed.of(before, part))
        self.rows.put(device, vector, self.initial[tier])

    def _before(self, device: int) -> Tensor:
        tier = self.tier_of[device]
        return self.fixed[tier].of(self.rows.vector(device)) if device in self.rows else self.start[tier]

    def average(self, tier: str) -> Weights:
        if tier not in self.trained:
            return self.initial[tier]
        fixed, moved = self.fixed[tier], self.ranks.total(self.moved[tier])
        return unpack(fixed.mean(self.start[tier] * fixed.devices + moved), self.initial[tier])

    def models(self) -> dict[str, TierModels]:
        """Returns the reported models by their owner, "devices"."""
        return {"devices": {tier: self.average(tier) for tier in self.initial}}
