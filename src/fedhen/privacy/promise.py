"""The promise of a run with differential privacy, in words and numbers, for its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedhen.config.settings import Config
from fedhen.privacy.choose import make_accountant

ADJACENCY = "the data of one device replaced by none; which devices there are, and their tiers, are public"
SIMULATED = "simulated: the noise follows from the seed and can be computed again, so these models have no guarantee"
NO_NOISE = "none: there is no noise"


def describe_promise(config: Config, records: Sequence[Mapping[str, Any]], is_fleet: bool) -> dict[str, Any]:
    """Returns what a summary says about privacy; empty without differential privacy."""
    if config.privacy.mechanism != "central":
        return {}
    accountant = make_accountant(config)
    found: dict[str, Any] = {
        "epsilon": records[-1].get("epsilon") if records else 0.0,
        "delta": accountant.delta,
        "adjacency": ADJACENCY,
        "accountant": describe_accountant(config),
        "releases": len(records),
    }
    status = NO_NOISE if not config.privacy.noise else "" if is_fleet else SIMULATED
    return {"privacy": {**found, **({"guarantee": status} if status else {})}}


def describe_accountant(config: Config) -> str:
    """Returns how ε is computed, in words."""
    accountant = make_accountant(config)
    if accountant.rate < 1:
        how = (
            "privacy loss distributions (dp-accounting)" if accountant.is_exact else "Rényi divergence, an upper bound"
        )
        return f"{how}, each device drawn with probability {accountant.rate:g}"
    if accountant.separation > 1:
        return f"Gaussian, each device at most once in any {accountant.separation} rounds, banded noise"
    return "Gaussian, as if each device took part in every round"
