"""Which weights the devices of a tier hold, derived from the method's objective and pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedhen import seeds
from fedhen.algorithm.merging import Pools
from fedhen.algorithm.objectives import Objective
from fedhen.data.inputs import Inputs, call_module
from fedhen.errors import ConfigError
from fedhen.models.family import Family, find_reached_weights, weights_of
from fedhen.params import Shapes, shapes_of


@dataclass(frozen=True)
class Holding:
    """The weights that a device of a tier holds."""

    shapes: Shapes
    """The weights that it receives and sends back in a round."""
    trained: frozenset[str]
    """The weights that count if `server.untrained_weights` is "skip": all but exits that it does not read."""
    learned: frozenset[str]
    """The parameters that its loss reaches, which a local variant corrects and remembers."""
    exits: tuple[str, ...]
    """The exits of its model that its objective reads or its pool shares, shallowest first."""
    fixed: Shapes = field(default_factory=dict)
    """The weights that no device of its pool trains, such as frozen ones. A device receives them once."""
    personal: Shapes = field(default_factory=dict)
    """The weights that are personal and never travel."""
    tuned: frozenset[str] = frozenset()
    """Those of them that its loss reaches."""


def find_holdings(
    family: Family, objectives: Mapping[str, Objective], pools: Pools, batch: tuple[Inputs, Tensor]
) -> dict[str, Holding]:
    """Finds what each tier holds, with a small batch of any examples.

    A device holds an exit if its objective reads it or its pool shares it with another tier. So the complex devices of
    FedHeN and NoSide hold the simple exit, and those of Decouple do not. What no device of a pool trains is part of the
    models, but does not travel in a round; buffers, which training may change, do. Of the names of a tied weight only
    the first counts.
    """
    found: dict[str, Holding] = {}
    tiers = list(objectives)
    aliases = find_aliases(family, tiers)
    for pool in check_pools(pools, tiers):
        held: dict[str, Holding] = {}
        shared: set[str] = set()
        for tier in sorted(pool, key=tiers.index):
            held[tier] = _find_holding(family, tier, objectives[tier], batch, pool, shared)
            shared |= held[tier].shapes.keys()
        changing = set[str]().union(*(each.learned | each.fixed.keys() for each in held.values()))
        found |= {tier: _leave_out_fixed(each, changing, aliases) for tier, each in held.items()}
    return {tier: found[tier] for tier in tiers}


def find_aliases(family: Family, tiers: Sequence[str]) -> frozenset[str]:
    """Returns the further names of tied weights. A weight whose first name is not the same in all tiers has none."""
    firsts: dict[str, set[str]] = {}
    for tier in tiers:
        with seeds.randomness(0, "holdings"):
            module = family.build(tier)
        first = {parameter: name for name, parameter in module.named_parameters()}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            firsts.setdefault(name, set()).add(first[parameter])
    return frozenset(name for name, first in firsts.items() if len(first) == 1 and first != {name})


def _leave_out_fixed(holding: Holding, changing: set[str], aliases: frozenset[str]) -> Holding:
    """Returns the holding with what does not change in `fixed`, and without further names of tied weights."""
    names = {name: shape for name, shape in holding.shapes.items() if name not in aliases}
    sent = {name: shape for name, shape in names.items() if name in changing}
    return replace(
        holding,
        shapes=sent,
        trained=holding.trained & sent.keys(),
        learned=holding.learned - aliases,
        fixed={name: shape for name, shape in names.items() if name not in sent},
    )


def check_pools(pools: Pools, tiers: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the pools. Raises a FedhenError unless every tier is in exactly one."""
    found = pools(tiers)
    if sorted(tier for pool in found for tier in pool) != sorted(tiers):
        raise ConfigError(f"a method must put every tier into exactly one pool, found {found}")
    return found


def _find_holding(
    family: Family,
    tier: str,
    objective: Objective,
    batch: tuple[Inputs, Tensor],
    pool: Sequence[str],
    shared: set[str],
) -> Holding:
    """Finds what a tier holds. The result has its buffers in `fixed`, for `find_holdings` to look at."""
    inputs, targets = batch
    with seeds.randomness(0, "holdings"):
        module = family.build(tier).to(targets.device)
        logits = list(call_module(module, inputs))
        loss = objective(logits, targets)
        (trained,) = find_reached_weights(module, [loss])
        by_exit = find_reached_weights(module, logits)
        # On outputs without a history: an exit may be read though all its weights are frozen.
        outputs = [z.detach().requires_grad_() for z in logits]
        read = torch.autograd.grad(objective(outputs, targets), outputs, allow_unused=True)
    if not trained:
        raise ConfigError(f"tier {tier!r} has nothing to train: no weight that its loss reaches has requires_grad")
    # What no exit reaches, such as a frozen layer or a buffer, still belongs to the model.
    idle = set().union(*by_exit) - trained
    held = {n: shape for n, shape in shapes_of(weights_of(module)).items() if n in shared or n not in idle}
    exits = tuple(e for e, g in zip(family.exits(tier), read, strict=True) if g is not None or e in pool)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers = {name: shape for name, shape in held.items() if name not in parameters}
    return Holding(held, frozenset(held.keys() - idle), frozenset(trained), exits, buffers)
