"""Bounded updates: no device moves the model by more than a norm, whatever it sends."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedhen.algorithm.averaging import Averaging, ByHolder, Contribution
from fedhen.algorithm.updates import Update
from fedhen.config.training_settings import ServerConfig
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.params import Average, TierModels, Weights, overlay
from fedhen.privacy.clipping import compute_norm, find_change, shorten
from fedhen.privacy.mechanism import Mechanism


@dataclass(frozen=True)
class Bounded:
    """Averages by holder what devices have changed, each change shortened to the bound."""

    rule: ServerConfig
    sent: TierModels
    bound: float

    def enter(self, update: Update) -> Contribution:
        contribution = ByHolder(self.rule).enter(update)
        change = find_change(contribution, self.sent[update.tier])
        bounded = shorten(change, compute_norm(learned_part(change, update)), self.bound)
        # Counters, such as a BatchNorm's number of batches, are no part of the vector.
        return contribution._replace(weights={**change, **learned_part(bounded, update)})

    def finish(self, average: Average, before: Weights, pool: tuple[str, ...]) -> Average:
        base = overlay([self.sent[tier] for tier in pool])
        for name in average.sums:
            average.sums[name] = average.sums[name] + base[name].double() * average.counts[name]
        return average


def learned_part(change: Weights, update: Update) -> Weights:
    """Returns the change of the weights that are not whole numbers."""
    return {name: tensor for name, tensor in change.items() if update.weights[name].is_floating_point()}


@dataclass(kw_only=True)
class BoundedUpdates(Mechanism):
    """Shortens every change to a fixed norm, or to the median of the norms of the round."""

    fixed: float = 0.0
    """The norm; 0: the median of each round."""
    ranks: Ranks = ALONE
    bound: float | None = None
    """Of the last round; None if nobody returned."""

    def begin(self, number: int, sent: TierModels, updates: Sequence[Update]) -> Averaging:
        self.bound = self.fixed or self.find_median(sent, updates)
        return Bounded(self.rule, sent, self.bound or 0.0)

    def find_median(self, sent: TierModels, updates: Sequence[Update]) -> float | None:
        """Returns the median norm over all ranks, the lower one of two, so that half of the devices may be bad."""
        by_holder = ByHolder(self.rule)
        norms = [
            compute_norm(learned_part(find_change(by_holder.enter(update), sent[update.tier]), update))
            for update in updates
        ]
        found = [norm for own in self.ranks.gather(norms) for norm in own]
        middle = statistics.median_low(found) if found else None
        return 0.0 if middle == math.inf else middle

    def publish(self, record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {**record, **({} if self.bound is None else {"bound": self.bound})}, {}
