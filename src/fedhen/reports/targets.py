"""Target values of the primary metric, in its unit, and the round that reaches them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Literal

from fedhen.config.recipes import RECIPES
from fedhen.errors import ConfigError, unknown_name
from fedhen.reports.comparison import Comparison
from fedhen.runs.reader import Run
from fedhen.runs.records import ACCURACY, MetricInfo

AUTO: Literal["auto"] = "auto"
RequestedTargets = Mapping[str, Sequence[float]] | Literal["auto"] | None
"""What a user asks for: values by tier, the auto rule for every tier, or the targets of the runs' configurations."""


@dataclass(frozen=True)
class TierTargets:
    """One tier's targets in the metric's unit, hardest first, and whether the auto rule set them."""

    values: tuple[float, ...]
    auto: bool


def rounds_to_target(run: Run, tier: str, target: float, owner: str = "devices") -> int | None:
    """Returns the first evaluated round that is as good as the target or better, without smoothing, or None.

    `target` is in the metric's unit: a share of 0.844 reaches a target of 84.4 %.
    """
    return next((number for number, value in run.curve(tier, owner) if run.metric.reaches(value, target)), None)


def auto_targets(runs: Sequence[Run], tier: str, owner: str = "devices") -> tuple[float, ...]:
    """Returns two targets of a tier that every evaluated run reaches, hardest first; see `describe_auto_rule`."""
    bests = [run.metric.best(value for _, value in curve) for run in runs if (curve := run.curve(tier, owner))]
    if not bests:
        return ()
    metric = runs[0].metric
    worst = min(bests) if metric.higher_is_better else max(bests)
    return _round_percents(metric, worst) if metric.unit == "%" else _round_values(metric, worst)


def _round_percents(metric: MetricInfo, worst: float) -> tuple[float, ...]:
    tenths, easier = round(1000 * worst, 5), -10 if metric.higher_is_better else 10
    start = math.floor(tenths) if metric.higher_is_better else math.ceil(tenths)
    return tuple(each / 10 for each in (start, start + easier) if 0 < each <= 1000)


def _round_values(metric: MetricInfo, worst: float) -> tuple[float, ...]:
    first = _round_to_two_digits(metric, Decimal(repr(worst)))
    tenth = abs(first) / 10
    second = _round_to_two_digits(metric, first - tenth if metric.higher_is_better else first + tenth)
    return tuple(map(float, dict.fromkeys((first, second))))


def _round_to_two_digits(metric: MetricInfo, value: Decimal) -> Decimal:
    """Rounds to two significant digits, towards the easier side. Decimals have no binary rounding errors."""
    step = Decimal(1).scaleb(value.adjusted() - 1)
    return value.quantize(step, ROUND_FLOOR if metric.higher_is_better else ROUND_CEILING)


def describe_auto_rule(metric: MetricInfo) -> str:
    """Returns the rule of `auto_targets` in words. For accuracy it is the paper's."""
    way, side = ("down", "below") if metric.higher_is_better else ("up", "above")
    digits, step = ("one decimal", "1.0") if metric.unit == "%" else ("two digits", "10 %")
    return f"the best {metric.title} of the worst run, rounded {way} to {digits}, and {step} {side} it"


def choose_targets(
    comparison: Comparison, given: RequestedTargets = None, owner: str = "devices"
) -> dict[str, TierTargets]:
    """Returns every tier's targets: the given ones, else the configured ones, else those of the auto rule."""
    metric = comparison.metric
    asked: Mapping[str, Sequence[float]] = {} if given is None or isinstance(given, str) else given
    for tier, values in asked.items():
        if tier not in comparison.tiers:
            raise unknown_name("tier", tier, comparison.tiers)
        for each in values:
            _check_target(metric, tier, each)
    chosen = {}
    for tier in comparison.tiers:
        wanted = () if given == AUTO else asked.get(tier, _list_configured(comparison, tier))
        hardest_first = tuple(sorted(set(wanted), reverse=metric.higher_is_better))
        chosen[tier] = TierTargets(hardest_first or auto_targets(comparison.runs, tier, owner), auto=not wanted)
    return chosen


def _check_target(metric: MetricInfo, tier: str, target: float) -> None:
    if metric.unit == "%" and not 0 < target <= 100:
        raise ConfigError(f"target {target:g} for {tier}: a target is a percentage above 0 and at most 100")
    if not math.isfinite(target):
        raise ConfigError(f"target {target:g} for {tier}: a target is a finite number")


def _list_configured(comparison: Comparison, tier: str) -> list[float]:
    return [each for run in comparison.runs for each in _configured(run, tier)]


def _configured(run: Run, tier: str) -> Sequence[float]:
    """Returns a tier's configured targets, unless they are a recipe's and the run has another primary metric."""
    targets, recipe = run.settings.targets.get(tier, []), RECIPES[run.recipe]() if run.recipe in RECIPES else None
    is_of_recipe = recipe is not None and [*recipe.targets.get(tier, ())] == targets
    # The recipes that have targets have them of the accuracy.
    return [] if is_of_recipe and run.metric != ACCURACY else targets


def format_target(metric: MetricInfo, target: float) -> str:
    # 84.4 %, 80.0 %, 80.25 %; 5.8, 120 m
    shown = f"{target:.1f}" if metric.unit == "%" and round(target, 1) == target else f"{target:g}"
    return f"{shown} {metric.unit}".strip()
