"""The server step: average every weight over the active devices that hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedhen.algorithm.local_variants import LocalVariant
from fedhen.algorithm.updates import Update
from fedhen.config.settings import ServerConfig
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.params import Average, TierModels, Weights, overlay, select, shapes_of

Pools = Callable[[Sequence[str]], list[tuple[str, ...]]]
"""Which tiers average their common weights together: tiers -> groups of tiers."""


def share_common_weights(tiers: Sequence[str]) -> list[tuple[str, ...]]:
    """All tiers in one pool: a weight is averaged over all active devices that hold it, whatever their tier."""
    return [tuple(tiers)]


def keep_tiers_apart(tiers: Sequence[str]) -> list[tuple[str, ...]]:
    """Each tier in a pool of its own."""
    return [(tier,) for tier in tiers]


def merge(
    server: TierModels, updates: Sequence[Update], pools: Pools, rule: ServerConfig, *, ranks: Ranks = ALONE
) -> TierModels:
    """Alg. 1, lines 17-22, Alg. 3 and 4 likewise: the next server models.

    In a pool, w_s = [w_c]_M: every tier is cut from one average. A weight nobody contributed to keeps its value.
    """
    merged: TierModels = {}
    for pool in pools(list(server)):
        # Before the merge the pool's tiers agree wherever they overlap: laying one over the other is no choice.
        before = overlay([server[tier] for tier in pool])
        average = Average(shapes_of(before))
        for update in updates:
            if update.tier in pool:
                weight = update.samples if rule.weighting == "samples" else 1.0
                average.add(select_contribution(update, rule), weight, update.rows)
        after = ranks.combine(average).finish(otherwise=before)
        merged.update({tier: select(after, shapes_of(server[tier])) for tier in pool})
    return {tier: merged[tier] for tier in server}


def select_contribution(update: Update, rule: ServerConfig) -> Weights:
    """The part of an update that enters the average."""
    if rule.untrained_weights == "average":
        return update.weights
    return {name: tensor for name, tensor in update.weights.items() if name in update.trained}


@dataclass(frozen=True)
class Memories:
    """The mean of all devices' memories, for each tier: the server's state of a local variant.

    It changes by what the active devices' memories changed, so that it stays the mean over all devices without asking
    the idle ones; each weight's mean is over the devices of the pool that train it.
    """

    mean: TierModels
    holders: dict[str, int]
    """How many devices each tier has, active or not."""

    def after(self, updates: Sequence[Update], pools: Pools, local: LocalVariant, *, ranks: Ranks = ALONE) -> Memories:
        """The mean after a round."""
        if local.remember is None:
            return self
        mean: TierModels = {}
        for pool in pools(list(self.mean)):
            before = overlay([self.mean[tier] for tier in pool])
            changes, everyone = Average(shapes_of(before)), Average(shapes_of(before))
            for tier in pool:
                everyone.add(self.mean[tier], self.holders[tier])
            for update in updates:
                if update.tier in pool:
                    changes.add(update.remembered, local.weight(update.omega))
            changes = ranks.combine(changes)
            after = {
                name: (tensor + changes.sums[name] / everyone.counts[name]).to(tensor.dtype)
                if name in changes.sums
                else tensor
                for name, tensor in before.items()
            }
            mean.update({tier: select(after, shapes_of(self.mean[tier])) for tier in pool})
        return Memories({tier: mean[tier] for tier in self.mean}, self.holders)

    def cloud(self, server: TierModels, local: LocalVariant) -> TierModels:
        """The models that devices start from."""
        if local.remember is None:
            return server
        return {
            tier: {n: local.cloud(w, self.mean[tier][n]) if n in self.mean[tier] else w for n, w in weights.items()}
            for tier, weights in server.items()
        }
