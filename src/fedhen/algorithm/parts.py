"""Which weights of each tier's model are personal, and what is left to send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from fedhen import seeds
from fedhen.algorithm.holdings import Holding
from fedhen.algorithm.personal import Personal
from fedhen.config.personal_settings import EXIT, EXITS
from fedhen.data.inputs import Inputs
from fedhen.errors import ConfigError
from fedhen.models.family import Family
from fedhen.models.last_layers import find_last_layers

Parts = Mapping[str, frozenset[str]]
"""Tier -> the names of its personal weights."""


def find_parts(
    family: Family, holdings: Mapping[str, Holding], personal: Personal, batch: tuple[Inputs, Tensor]
) -> dict[str, frozenset[str]]:
    """Returns the personal weights of each tier, of those that its devices train."""
    found: dict[str, frozenset[str]] = {}
    named = [name for name in personal.part if name not in (EXIT, EXITS)]
    matched: set[str] = set()
    for tier, holding in holdings.items():
        chosen = set()
        for name in named:
            own = {weight for weight in holding.shapes if is_within(weight, name)}
            matched |= {name} if own else set()
            chosen |= own
        if layers := find_exit_layers(family, tier, personal.part, batch):
            chosen |= {weight for weight in holding.shapes if any(is_within(weight, layer) for layer in layers)}
        found[tier] = frozenset(chosen)
    if missing := [name for name in named if name not in matched]:
        raise ConfigError(
            f"personal.part names nothing that devices train with {missing[0]!r}: choose exit, exits, or the name of a "
            f"layer or weight, like {next(iter(next(iter(holdings.values())).shapes))}"
        )
    return found


def is_within(weight: str, name: str) -> bool:
    """Returns whether a weight is the one of that name, or is in the layer of that name."""
    return weight == name or weight.startswith(f"{name}.")


def find_exit_layers(family: Family, tier: str, part: Sequence[str], batch: tuple[Inputs, Tensor]) -> list[str]:
    """Returns the last layers of the exits that the part asks for."""
    if EXIT not in part and EXITS not in part:
        return []
    with seeds.randomness(0, "parts"):
        module: nn.Module = family.build(tier).to(batch[1].device)
        layers = find_last_layers(module, batch[0])
    if layers[-1] is None:
        raise ConfigError(
            f"personal.part needs exits that end in a layer of their own, and that of tier {tier!r} does not: name "
            "weights instead"
        )
    wanted = layers if EXITS in part else layers[-1:]
    # A nested exit that is computed with a share of the channels is a corner of the own one.
    return [layer.name for layer in wanted if layer is not None]


def withhold(
    holdings: Mapping[str, Holding], parts: Parts, pools: Iterable[Sequence[str]], part: Sequence[str]
) -> dict[str, Holding]:
    """Returns the holdings without the parts in what is sent; they are in `personal`."""
    for pool in pools:
        refuse_shared(pool, holdings, parts, part)
    return {tier: withhold_part(tier, holding, parts[tier]) for tier, holding in holdings.items()}


def withhold_part(tier: str, holding: Holding, part: frozenset[str]) -> Holding:
    sent = {name: shape for name, shape in holding.shapes.items() if name not in part}
    if not sent:
        raise ConfigError(f"personal.part leaves nothing that devices of tier {tier!r} share: name fewer weights")
    return replace(
        holding,
        shapes=sent,
        trained=holding.trained - part,
        learned=holding.learned - part,
        personal={name: shape for name, shape in holding.shapes.items() if name in part},
        tuned=holding.learned & part,
    )


def refuse_shared(pool: Sequence[str], holdings: Mapping[str, Holding], parts: Parts, part: Sequence[str]) -> None:
    """Refuses a part with weights that tiers share, other than exits: without their average nothing would be shared."""
    if len(pool) < 2:
        return
    for name in (name for name in part if name not in (EXIT, EXITS)):
        for weight in sorted(set().union(*(parts[tier] for tier in pool))):
            holders = [tier for tier in pool if weight in holdings[tier].shapes]
            if is_within(weight, name) and len(holders) > 1:
                raise ConfigError(
                    f"personal.part={name} has {weight}, which tiers {' and '.join(holders)} share: keep it shared, or "
                    "keep the tiers apart with method=decouple"
                )
