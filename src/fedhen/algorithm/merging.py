"""The server's step: every weight is averaged over the active devices that hold it, and steps to the average."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from fedhen.algorithm.averaging import Averaging
from fedhen.algorithm.local_variants import LocalVariant
from fedhen.algorithm.server_optimizers import NO_MOMENTS, TAKE_AVERAGE, ServerOptimizer
from fedhen.algorithm.updates import Update
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.params import Average, TierModels, Weights, overlay, select, shapes_of

Pools = Callable[[Sequence[str]], list[tuple[str, ...]]]
"""Which tiers are averaged together.

Args:
    tiers: The names of the run's tiers, shallowest first.

Returns:
    Groups of tiers, called pools. Every tier is in exactly one. Tiers of a pool share the weights that they have in
    common.

The first two tiers share, and so do all others:

    def two_pools(tiers):
        return [tuple(tiers[:2]), tuple(tiers[2:])]
"""


Growth = Mapping[str, float]
"""Tier -> the factor by which ω of its devices changes when others join."""


def share_common_weights(tiers: Sequence[str]) -> list[tuple[str, ...]]:
    """Puts all tiers into one pool: a weight is averaged over all active devices that hold it."""
    return [tuple(tiers)]


def keep_tiers_apart(tiers: Sequence[str]) -> list[tuple[str, ...]]:
    """Puts each tier into a separate pool."""
    return [(tier,) for tier in tiers]


class Merged(NamedTuple):
    """The server after a round."""

    models: TierModels
    moments: TierModels
    """Of the server's optimiser; empty if it has none."""


def merge(
    server: TierModels,
    updates: Sequence[Update],
    pools: Pools,
    averaging: Averaging,
    optimizer: ServerOptimizer = TAKE_AVERAGE,
    moments: TierModels = NO_MOMENTS,
    *,
    ranks: Ranks = ALONE,
) -> Merged:
    """Returns the next server models (Alg. 1, lines 17-22; also Alg. 3 and 4), and the optimiser's next moments.

    All tiers of a pool are cut from one average, so that w_s = [w_c]_M. A weight without contributions keeps its value
    and its moments.
    """
    after = Merged({}, {})
    for pool in pools(list(server)):
        # The tiers of a pool are equal wherever they overlap, so the order of the overlay does not matter.
        before, before_moments = (overlay([part[tier] for tier in pool if tier in part]) for part in (server, moments))
        average = Average(shapes_of(before))
        for update in updates:
            if update.tier in pool:
                average.add(*averaging.enter(update))
        average = averaging.finish(ranks.combine(average), before, pool)
        models, next_moments = optimizer.apply(before, average, before_moments)
        after.models.update({tier: select(models, shapes_of(server[tier])) for tier in pool})
        after.moments.update({t: select(next_moments, shapes_of(moments[t])) for t in pool if t in moments})
    return Merged(*({tier: part[tier] for tier in server if tier in part} for part in after))


@dataclass(frozen=True)
class Memories:
    """The server's state of a local variant: the mean of all devices' memories.

    Each weight's mean is over all devices of the pool that train the weight, active or not. Only active devices change
    their memories, so the mean follows from what they changed.
    """

    mean: TierModels
    """Tier -> the mean, for the weights that its devices train; empty if the local variant has no memory."""
    tier_sizes: dict[str, int]
    """Tier -> the number of its devices, active or not."""

    def update(self, updates: Sequence[Update], pools: Pools, local: LocalVariant, *, ranks: Ranks = ALONE) -> Memories:
        """Returns the mean after a round with these updates."""
        if local.remember is None:
            return self
        mean: TierModels = {}
        for pool in pools(list(self.mean)):
            before = overlay([self.mean[tier] for tier in pool])
            changes, trainers = Average(shapes_of(before)), self.count_trainers(pool, before, self.tier_sizes)
            for update in updates:
                if update.tier in pool:
                    changes.add(update.memory_change, local.memory_weight(update.omega))
            changes = ranks.combine(changes)
            after = {
                name: (tensor + changes.sums[name] / trainers[name]).to(tensor.dtype)
                if name in changes.sums
                else tensor
                for name, tensor in before.items()
            }
            mean.update({tier: select(after, shapes_of(self.mean[tier])) for tier in pool})
        return Memories({tier: mean[tier] for tier in self.mean}, self.tier_sizes)

    def admit(self, tier_sizes: Mapping[str, int], pools: Pools, local: LocalVariant, growth: Growth) -> Memories:
        """Returns the mean when devices have joined whose memories are zeros.

        The mean of a weight is (1/T)·Σ g(ω_i)·h_i over the T devices of its pool that train it, where h_i are the
        memories and g is the variant's `memory_weight`. Newcomers add nothing to the sum, and one to T for the weights
        that they train. Every ω_i = n_i·N/n of the pool changes by the same factor q, since N and n count the newcomers
        and n_i does not change; and g(q·ω) = g(q)·g(ω) for both g there are. So the mean becomes g(q)·T/T′ times
        what it was, and is again what its definition says of all the devices.
        """
        if local.remember is None:
            return replace(self, tier_sizes=dict(tier_sizes))
        mean: TierModels = {}
        for pool in pools(list(self.mean)):
            before = overlay([self.mean[tier] for tier in pool])
            old, new = (self.count_trainers(pool, before, sizes) for sizes in (self.tier_sizes, tier_sizes))
            factor = local.memory_weight(growth[pool[0]])
            after = {n: (t.double() * (factor * old[n] / new[n])).to(t.dtype) for n, t in before.items()}
            mean.update({tier: select(after, shapes_of(self.mean[tier])) for tier in pool})
        return Memories({tier: mean[tier] for tier in self.mean}, dict(tier_sizes))

    def count_trainers(
        self, pool: Sequence[str], like: Weights, tier_sizes: Mapping[str, int]
    ) -> dict[str, float | Tensor]:
        """Returns, for each weight or each of its elements, how many devices of a pool train it."""
        trainers = Average(shapes_of(like))
        for tier in pool:
            trainers.add(self.mean[tier], tier_sizes[tier])
        return trainers.counts

    def starting_models(self, server: TierModels, local: LocalVariant) -> TierModels:
        """Returns the models that devices start from."""
        if local.remember is None:
            return server
        return {
            tier: {
                n: local.starting_weight(w, self.mean[tier][n]) if n in self.mean[tier] else w
                for n, w in weights.items()
            }
            for tier, weights in server.items()
        }
