"""Which weights the devices of a tier hold, derived from the method's objective and pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhen import seeds
from fedhen.algorithm.merging import Pools
from fedhen.algorithm.objectives import Objective
from fedhen.data.inputs import Inputs, call_module
from fedhen.errors import UserError
from fedhen.models.family import Family, find_reached_weights, weights_of
from fedhen.params import Shapes, shapes_of


@dataclass(frozen=True)
class Holding:
    """The weights that a device of a tier holds."""

    shapes: Shapes
    """The weights that it receives and sends back."""
    trained: frozenset[str]
    """The weights that count if `server.untrained_weights` is "skip": all but exits that it does not read."""
    learned: frozenset[str]
    """The parameters that its loss reaches, which a local variant corrects and remembers."""
    exits: tuple[str, ...]
    """The exits of its model that its objective reads or its pool shares, shallowest first."""


def find_holdings(
    family: Family, objectives: Mapping[str, Objective], pools: Pools, batch: tuple[Inputs, Tensor]
) -> dict[str, Holding]:
    """Finds what each tier holds, with a small batch of any examples.

    A device holds an exit if its objective reads it or its pool shares it with another tier. So the complex devices of
    FedHeN and NoSide hold the simple exit, and those of Decouple do not.
    """
    found: dict[str, Holding] = {}
    tiers = list(objectives)
    for pool in check_pools(pools, tiers):
        shared: set[str] = set()
        for tier in sorted(pool, key=tiers.index):
            found[tier] = _find_holding(family, tier, objectives[tier], batch, pool, shared)
            shared |= found[tier].shapes.keys()
    return {tier: found[tier] for tier in tiers}


def check_pools(pools: Pools, tiers: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the pools. Raises a UserError unless every tier is in exactly one."""
    found = pools(tiers)
    if sorted(tier for pool in found for tier in pool) != sorted(tiers):
        raise UserError(f"a method must put every tier into exactly one pool, found {found}")
    return found


def _find_holding(
    family: Family,
    tier: str,
    objective: Objective,
    batch: tuple[Inputs, Tensor],
    pool: Sequence[str],
    shared: set[str],
) -> Holding:
    inputs, targets = batch
    with seeds.randomness(0, "holdings"):
        module = family.build(tier).to(targets.device)
        logits = list(call_module(module, inputs))
        loss = objective(logits, targets)
        read = torch.autograd.grad(loss, logits, allow_unused=True, retain_graph=True)
        (trained,) = find_reached_weights(module, [loss])
        by_exit = find_reached_weights(module, logits)
    # What no exit reaches, such as a frozen layer or a buffer, still belongs to the model and to its updates.
    idle = set().union(*by_exit) - trained
    held = {n: shape for n, shape in shapes_of(weights_of(module)).items() if n in shared or n not in idle}
    exits = tuple(e for e, g in zip(family.exits(tier), read, strict=True) if g is not None or e in pool)
    return Holding(held, frozenset(held.keys() - idle), frozenset(trained), exits)
