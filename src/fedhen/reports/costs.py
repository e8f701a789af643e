"""The cost of reaching a target, in rounds or in bytes, and the hero's gain over the best other method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from statistics import mean, stdev

from fedhen.reports.comparison import list_evaluated
from fedhen.reports.targets import rounds_to_target
from fedhen.runs.reader import Run
from fedhen.runs.records import MetricInfo

Spent = Callable[[Run, int, str], float]
"""(run, round, tier) -> what the run has spent on the tier's model by the end of the round."""
Format = Callable[[Sequence[float]], str]
"""Writes the amounts of one method, one per seed, into a cell."""


class Outcome(StrEnum):
    """Whether a run reached a target, in the words of the tables."""

    REACHED = "reached"
    MISSED = "not reached"
    PENDING = "not yet"
    BLANK = "not evaluated"
    DAMAGED = "damaged"
    ABSENT = "–"


@dataclass(frozen=True)
class Goal:
    """A target in the metric's unit for the model of a tier, the server's or the all-devices average."""

    tier: str
    target: float
    owner: str


@dataclass(frozen=True)
class Cost:
    """What a run spent to reach a goal, or all that it spent without reaching it: a lower bound."""

    amount: float
    outcome: Outcome

    @property
    def exact(self) -> bool:
        return self.outcome is Outcome.REACHED


@dataclass(frozen=True)
class Measure:
    """A kind of cost: its names, how it is computed and how amounts are written."""

    name: str
    unit: str
    noun: str
    meaning: str
    """With {metric} for the name of the metric, and {better} for "more" or "less"."""
    spent: Spent
    choose_format: Callable[[Sequence[float]], Format]
    """Returns the format of all cells of a row, given its amounts."""
    axis: Callable[[float], tuple[float, str]]
    """Returns the divisor and the label of an axis that ends at the given amount."""
    whole: bool = False
    """Whether an axis has ticks at whole numbers only."""

    @property
    def table(self) -> str:
        """The name of its table."""
        return f"{self.name}-to-target"

    def explain(self, metric: MetricInfo) -> str:
        """Returns the meaning of the measure for targets of this metric."""
        return self.meaning.format(metric=metric.title, better="more" if metric.higher_is_better else "less")


def measure_cost(run: Run, goal: Goal, spent: Spent) -> Cost:
    """Returns what a run spent to reach the goal, or until its last evaluated round."""
    if goal.tier not in run.tiers:
        return Cost(0, Outcome.ABSENT)
    reached = rounds_to_target(run, goal.tier, goal.target, goal.owner)
    if reached is not None:
        return Cost(spent(run, reached, goal.tier), Outcome.REACHED)
    evaluated = list_evaluated(run)
    if not evaluated or goal.owner not in run.owners:
        return Cost(0, Outcome.BLANK)
    in_vain = spent(run, evaluated[-1], goal.tier)
    if not run.is_complete:
        return Cost(in_vain, Outcome.PENDING)
    # The lost rounds of a damaged run may have reached the target.
    return Cost(in_vain, Outcome.DAMAGED if run.damage else Outcome.MISSED)


def format_costs(costs: Sequence[Cost], show: Format) -> str:
    """Writes one method's costs into a cell: the amount, or the mean ± standard deviation of several seeds."""
    if all(each.outcome is Outcome.ABSENT for each in costs):
        return str(Outcome.ABSENT)
    reached = [each.amount for each in costs if each.exact]
    if len(reached) == len(costs):
        return show(reached)
    return str(costs[0].outcome) if len(costs) == 1 else f"{len(reached)} of {len(costs)} reached"


def gain(hero: Sequence[Cost], baselines: Sequence[Sequence[Cost]]) -> str:
    """Returns the best baseline's mean cost divided by the hero's: 2.8×, a lower bound like > 3.4×, or – if unknown.

    A baseline that did not reach the target counts with what it spent, which is less than it would need.
    """
    baselines = [costs for costs in baselines if all(each.outcome is not Outcome.ABSENT for each in costs)]
    if not baselines or not all(each.exact for each in hero):
        return "–"
    own = mean(each.amount for each in hero)
    best, bound = min(
        (mean(each.amount for each in costs), not all(each.exact for each in costs)) for costs in baselines
    )
    if own <= 0 or (bound and best < own):
        return "–"
    tenths = 10 * best / own
    # A lower bound is rounded down, so that it remains one.
    return f"> {math.floor(tenths) / 10:.1f}×" if bound else f"{math.floor(tenths + 0.5) / 10:.1f}×"


def format_spread(values: Sequence[float], decimals: int, unit: str = "", kind: str = "f") -> str:
    """Writes one value, or the mean ± standard deviation of several; with powers of ten if `kind` is "e"."""
    if not values:
        return "–"
    deviation = f" ± {stdev(values):.{decimals}{kind}}" if len(values) > 1 else ""
    return f"{mean(values):.{decimals}{kind}}{deviation}{unit}"


BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
JOULE_UNITS = ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"))
TIME_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
Units = Sequence[tuple[float, str]]
"""The size and the name of each unit, largest first."""


def choose_unit(amount: float, units: Units = BYTE_UNITS) -> tuple[float, str]:
    """Returns the size and the name of the largest unit that does not exceed the amount."""
    return next((unit for unit in units if amount >= unit[0]), units[-1])


def _format_rounds(values: Sequence[float]) -> str:
    return format_spread(values, decimals=0 if len(values) == 1 else 1)


def choose_format_in(units: Units, row: Sequence[float]) -> Format:
    """Returns a format in one unit for the whole row, that of its smallest amount: cells are easy to compare."""
    size, unit = choose_unit(min(row, default=0), units)

    def show(values: Sequence[float]) -> str:
        scaled = [each / size for each in values]
        decimals = 0 if unit == "B" else max(0, 2 - int(math.log10(max(1, mean(scaled)))))
        return format_spread(scaled, decimals, f" {unit}")

    return show


def _byte_axis(furthest: float) -> tuple[float, str]:
    size, unit = choose_unit(furthest)
    return size, f"{unit} sent, all devices, down and up"


ROUNDS = Measure(
    name="rounds",
    unit="rounds",
    noun="rounds",
    meaning="The number of rounds after which a tier’s model first scored the {metric} on the left, or {better}, on "
    "the test set. Nothing is smoothed.",
    spent=lambda run, number, tier: number,
    choose_format=lambda row: _format_rounds,
    axis=lambda furthest: (1, "round"),
    whole=True,
)
BYTES = Measure(
    name="bytes",
    unit="bytes",
    noun="bytes sent",
    meaning="All that the server and the devices of every tier had sent each other, down and up, by the round that "
    "first scored the {metric} on the left, or {better}. A small model costs fewer bytes a round than a large one, so "
    "bytes tell more than rounds do where the methods send different models.",
    spent=lambda run, number, tier: sum(run.bytes_sent[number].values()),
    choose_format=partial(choose_format_in, BYTE_UNITS),
    axis=_byte_axis,
)
OWN_BYTES = Measure(
    name="own-bytes",
    unit="bytes",
    noun="bytes sent by the tier’s own devices",
    meaning="What the server and the devices of this tier alone had sent each other, down and up, by that round: what "
    "a model costs those who use it.",
    spent=lambda run, number, tier: run.bytes_sent[number][tier],
    choose_format=partial(choose_format_in, BYTE_UNITS),
    axis=_byte_axis,
)
