"""Target accuracies in percent, and the round that reaches them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedhen.errors import UserError, unknown_name
from fedhen.reports.comparison import Comparison
from fedhen.runs.reader import Run

AUTO: Literal["auto"] = "auto"
RequestedTargets = Mapping[str, Sequence[float]] | Literal["auto"] | None
"""What a user asks for: percents by tier, the auto rule for every tier, or the targets of the runs' configurations."""


@dataclass(frozen=True)
class TierTargets:
    """One tier's targets, highest first, and whether the auto rule set them."""

    percents: tuple[float, ...]
    auto: bool


def to_percent(accuracy: float) -> float:
    """Converts an accuracy between 0 and 1, without binary rounding errors: 0.844 reaches a target of 84.4."""
    return round(100 * accuracy, 6)


def rounds_to_target(run: Run, tier: str, target: float, owner: str = "devices") -> int | None:
    """Returns the first evaluated round at or above the target percent, without smoothing, or None."""
    return next((number for number, accuracy in run.curve(tier, owner) if to_percent(accuracy) >= target), None)


def auto_targets(runs: Sequence[Run], tier: str, owner: str = "devices") -> tuple[float, ...]:
    """Applies the paper's rule: the worst run's best accuracy, rounded down to one decimal, and 1.0 below."""
    bests = [max(accuracy for _, accuracy in curve) for run in runs if (curve := run.curve(tier, owner))]
    if not bests:
        return ()
    tenths = math.floor(round(1000 * min(bests), 5))
    return tuple(each / 10 for each in (tenths, tenths - 10) if each > 0)


def choose_targets(
    comparison: Comparison, given: RequestedTargets = None, owner: str = "devices"
) -> dict[str, TierTargets]:
    """Returns every tier's targets: the given ones, else the configured ones, else those of the auto rule."""
    asked: Mapping[str, Sequence[float]] = {} if given is None or isinstance(given, str) else given
    for tier, percents in asked.items():
        if tier not in comparison.tiers:
            raise unknown_name("tier", tier, comparison.tiers)
        for each in percents:
            if not 0 < each <= 100:
                raise UserError(f"target {each:g} for {tier}: a target is a percentage above 0 and at most 100")
    chosen = {}
    for tier in comparison.tiers:
        wanted = () if given == AUTO else asked.get(tier, _list_configured(comparison, tier))
        percents = tuple(sorted(set(wanted), reverse=True)) or auto_targets(comparison.runs, tier, owner)
        chosen[tier] = TierTargets(percents, auto=not wanted)
    return chosen


def _list_configured(comparison: Comparison, tier: str) -> list[float]:
    return [each for run in comparison.runs for each in run.settings.targets.get(tier, [])]


def format_percent(target: float) -> str:
    # 84.4 %, 80.0 %, 80.25 %
    return f"{target:.1f} %" if round(target, 1) == target else f"{target:g} %"
