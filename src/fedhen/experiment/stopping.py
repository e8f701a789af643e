"""Decides whether a run stops before its last planned round: its targets are reached, or it no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedhen.config.evaluation_settings import StopConfig
from fedhen.config.settings import Config
from fedhen.runs.records import MetricInfo

FINISHED_BY_HAND = "finished by hand"


def find_reason(
    stop: StopConfig, metric: MetricInfo, number: int, values: Mapping[str, float | None], waited: int
) -> str:
    """Returns why a run stops after an evaluation, or "" if it continues.

    Args:
        stop: The rule.
        number: The round.
        metric: The primary metric.
        values: Tier -> its value, of the models that reports show.
        waited: The number of evaluations in a row that have improved no tier.
    """
    found = {tier: values.get(tier) for tier in stop.until}
    if found and all(x is not None and metric.reaches(x, stop.until[tier]) for tier, x in found.items()):
        targets = ", ".join(f"{tier} {target:g} {metric.unit}".strip() for tier, target in stop.until.items())
        return f"reached {targets} in round {number}"
    if stop.patience and waited >= stop.patience:
        return f"no improvement in {waited} evaluation{'s' * (waited > 1)}"
    return ""


def describe_rule(config: Config) -> dict[str, Any]:
    """Returns what decides when a run ends, as JSON represents it."""
    budget = {"budget": config.privacy.budget} if config.privacy.budget else {}
    return {"rounds": config.rounds, "until": dict(config.stop.until), "patience": config.stop.patience, **budget}


def read_rule(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same from the settings by their full keys, as a checkpoint has them."""
    budget = {"budget": settings["privacy.budget"]} if settings.get("privacy.budget") else {}
    return {
        "rounds": settings["rounds"],
        "until": settings.get("stop.until", {}),
        "patience": settings.get("stop.patience", 0),
        **budget,
    }
