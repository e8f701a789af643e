"""Which weights a device of a tier holds under a method: found from the objective and the merge, declared nowhere."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedhen import seeds
from fedhen.algorithm.methods import Method
from fedhen.models.nesting import Family, reached, weights_of
from fedhen.params import Shapes, shapes_of


@dataclass(frozen=True)
class Holding:
    """What a device of a tier holds."""

    shapes: Shapes
    """The weights that it receives, and sends back."""
    trained: frozenset[str]
    """Those that its objective reaches."""
    exits: tuple[str, ...]
    """The exits of its model that it holds whole, shallowest first."""


def holdings(family: Family, method: Method, sample: Tensor, labels: Tensor) -> dict[str, Holding]:
    """What each tier holds: an exit is held if the objective uses it or the merge shares it with another tier.

    So FedHeN's and NoSide's complex devices carry the simple exit, Decouple's do not. The sample is any small batch.
    """
    found: dict[str, Holding] = {}
    for pool in method.pools(family.tiers):
        shared: set[str] = set()
        for tier in pool:
            found[tier] = _holding(family, tier, method, (sample, labels), shared)
            shared |= found[tier].shapes.keys()
    return {tier: found[tier] for tier in family.tiers}


def _holding(family: Family, tier: str, method: Method, batch: tuple[Tensor, Tensor], shared: set[str]) -> Holding:
    sample, labels = batch
    with seeds.torch_randomness(0, "holdings"):
        module = family.build(tier).to(sample.device)
        logits = module(sample)
        (trained,) = reached(module, [method.objective(logits, labels)])
        by_exit = reached(module, logits)
    # What no exit reaches (a frozen layer, a buffer) belongs to the model all the same.
    used_by_an_exit = set().union(*by_exit)
    kept = {n: s for n, s in shapes_of(weights_of(module)).items() if n in trained | shared or n not in used_by_an_exit}
    exits = tuple(e for e, names in zip(family.exits(tier), by_exit, strict=True) if names <= kept.keys())
    return Holding(kept, frozenset(trained), exits)
