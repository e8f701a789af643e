"""Which weights a device of a tier holds under a method: found from the objective and the merge, declared nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedhen import seeds
from fedhen.algorithm.methods import Method
from fedhen.errors import UserError
from fedhen.models.nesting import Family, reached, weights_of
from fedhen.params import Shapes, shapes_of


@dataclass(frozen=True)
class Holding:
    """What a device of a tier holds."""

    shapes: Shapes
    """The weights that it receives, and sends back."""
    trained: frozenset[str]
    """Those among them that its objective trains."""
    exits: tuple[str, ...]
    """The exits of its model that it holds whole, shallowest first."""


def holdings(family: Family, tiers: Sequence[str], method: Method, batch: tuple[Tensor, Tensor]) -> dict[str, Holding]:
    """What each tier holds: an exit is held if the objective uses it or the merge shares it with another tier.

    So FedHeN's and NoSide's complex devices carry the simple exit, Decouple's do not. Tiers that no device has
    are left out. Any small batch will do.
    """
    found: dict[str, Holding] = {}
    for pool in checked_pools(method, tiers):
        shared: set[str] = set()
        for tier in sorted(pool, key=tiers.index):
            found[tier] = _holding(family, tier, method, batch, shared)
            shared |= found[tier].shapes.keys()
    return {tier: found[tier] for tier in tiers}


def checked_pools(method: Method, tiers: Sequence[str]) -> list[tuple[str, ...]]:
    """The method's pools, if every tier is in exactly one."""
    pools = method.pools(tiers)
    if sorted(tier for pool in pools for tier in pool) != sorted(tiers):
        raise UserError(f"method {method.name!r} must put every tier into exactly one pool, found {pools}")
    return pools


def _holding(family: Family, tier: str, method: Method, batch: tuple[Tensor, Tensor], shared: set[str]) -> Holding:
    inputs, labels = batch
    with seeds.torch_randomness(0, "holdings"):
        module = family.build(tier).to(inputs.device)
        logits = module(inputs)
        (trained,) = reached(module, [method.objective(logits, labels)])
        by_exit = reached(module, logits)
    # What no exit reaches (a frozen layer, a buffer) belongs to the model, and to its updates, all the same.
    idle = set().union(*by_exit) - trained
    held = {n: shape for n, shape in shapes_of(weights_of(module)).items() if n in shared or n not in idle}
    exits = tuple(e for e, names in zip(family.exits(tier), by_exit, strict=True) if names <= held.keys())
    return Holding(held, frozenset(held.keys() - idle), exits)
