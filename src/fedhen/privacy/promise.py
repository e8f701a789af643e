"""The promise of a run with differential privacy, in words and numbers, for its summary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedhen.config.settings import Config
from fedhen.privacy.choose import make_accountant

ADJACENCY = "the data of one device replaced by none; which devices there are, and their tiers, are public"
SIMULATED = "simulated: the noise follows from the seed and can be computed again, so these models have no guarantee"
NO_NOISE = "none: there is no noise"


def describe_promise(
    config: Config, records: Sequence[Mapping[str, Any]], is_fleet: bool, spent: Sequence[int]
) -> dict[str, Any]:
    """Returns what a summary says about privacy; empty without differential privacy.

    Args:
        config: The settings.
        records: The records of the rounds.
        is_fleet: Whether a real fleet played the run.
        spent: The noisy sums that each stream of noise has released, where these are not the rounds.
    """
    if not config.privacy.is_private:
        return {}
    accountant, streams = make_accountant(config), spent or [len(records)]
    epsilon = accountant.epsilon(streams)
    found: dict[str, Any] = {
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "delta": accountant.delta,
        "adjacency": ADJACENCY,
        "accountant": describe_accountant(config),
        "releases": sum(streams),
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
