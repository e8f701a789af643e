"""The server step: average every weight over the active devices that hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedhen.config import ServerConfig
from fedhen.params import Average, Weights, select, shapes_of

Server = dict[str, Weights]
"""The server's model of each tier."""

Pools = Callable[[Sequence[str]], list[tuple[str, ...]]]
"""Which tiers average their common weights together: tiers -> groups of tiers."""


@dataclass(frozen=True)
class Update:
    """What an active device sends back: its trained weights."""

    device: int
    tier: str
    weights: Weights
    trained: frozenset[str]
    """The weights that its objective trains."""
    samples: int
    loss: float


def share_common_weights(tiers: Sequence[str]) -> list[tuple[str, ...]]:
    """All tiers in one pool: a weight is averaged over all active devices that hold it, whatever their tier."""
    return [tuple(tiers)]


def keep_tiers_apart(tiers: Sequence[str]) -> list[tuple[str, ...]]:
    """Each tier in a pool of its own."""
    return [(tier,) for tier in tiers]


def merge(server: Server, updates: Sequence[Update], pools: Pools, rule: ServerConfig) -> Server:
    """Alg. 1, lines 17-22, Alg. 3 and 4 likewise: the next server models.

    In a pool, w_s = [w_c]_M: every tier is cut from one average. A weight nobody contributed to keeps its value.
    """
    merged: Server = {}
    for pool in pools(list(server)):
        # Before the merge the pool's tiers agree wherever they overlap: laying one over the other is no choice.
        before: Weights = {}
        for tier in pool:
            before.update(server[tier])
        average = Average(shapes_of(before))
        for update in updates:
            if update.tier in pool:
                average.add(contribution(update, rule), update.samples if rule.weighting == "samples" else 1.0)
        after = average.finish(otherwise=before)
        merged.update({tier: select(after, shapes_of(server[tier])) for tier in pool})
    return {tier: merged[tier] for tier in server}


def contribution(update: Update, rule: ServerConfig) -> Weights:
    """The part of an update that enters the average."""
    if rule.untrained == "average":
        return update.weights
    return {name: tensor for name, tensor in update.weights.items() if name in update.trained}
