"""The tables of a report: rounds to target, bytes to target, and the outcome of the runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Literal

from fedhen.reports.comparison import Comparison, choose_owner, rounds_done
from fedhen.reports.costs import (
    BYTES,
    OWN_BYTES,
    ROUNDS,
    Goal,
    Measure,
    format_costs,
    format_spread,
    gain,
    measure_cost,
)
from fedhen.reports.rendering import Group, Table
from fedhen.reports.targets import TierTargets, format_percent, to_percent
from fedhen.runs.reader import Run

GAIN = "Gain"
OWNER_NAMES = {"devices": "all-devices average", "server": "server model"}
OWNER_LABELS = {"devices": "all devices", "server": "server"}
AUTO_RULE = "the best accuracy of the worst run, rounded down to one decimal, and 1.0 below it"
SEEDS = "n runs with different seeds: mean ± sample standard deviation"
SEEDS_TO_TARGET = f"{SEEDS}, where all of them reached the target."
LOWER_BOUND = (
    "A “>” marks a lower bound: some run of another method ended short of the target, and counts with all that it had "
    "spent by then."
)


def make_tables(comparison: Comparison, targets: Mapping[str, TierTargets], owner: str) -> tuple[Table, ...]:
    return (
        make_cost_table(comparison, targets, owner, ROUNDS),
        make_cost_table(comparison, targets, owner, BYTES),
        make_cost_table(comparison, targets, owner, OWN_BYTES),
        make_outcome_table(comparison),
    )


def make_cost_table(comparison: Comparison, targets: Mapping[str, TierTargets], owner: str, measure: Measure) -> Table:
    """Makes a table in the paper's layout: tiers, a row per target, a column per method, and the hero's gain."""
    gains = (GAIN,) if comparison.others else ()
    groups = []
    for tier in comparison.tiers:
        goals = [Goal(tier, target, owner) for target in targets[tier].percents]
        rows = tuple(_cost_row(comparison, goal, measure) for goal in goals)
        groups.append(Group(f"{tier} model", rows))
    return Table(
        name=f"{measure.name}-to-target",
        title=f"{measure.noun[0].upper()}{measure.noun[1:]} to target ({OWNER_NAMES[owner]})",
        columns=("Accuracy", *map(comparison.heading, comparison.methods), *gains),
        groups=tuple(groups),
        meaning=_cost_meaning(comparison, measure),
        notes=tuple(_cost_notes(comparison, targets, groups)),
        strong=GAIN,
    )


def _cost_row(comparison: Comparison, goal: Goal, measure: Measure) -> tuple[str, ...]:
    costs = {
        name: [measure_cost(run, goal, measure.spent) for run in runs] for name, runs in comparison.by_method.items()
    }
    show = measure.choose_format([each.amount for each in chain.from_iterable(costs.values()) if each.exact])
    baselines = [costs[name] for name in comparison.others]
    gains = [gain(costs[comparison.hero], baselines)] if baselines else []
    return (format_percent(goal.target), *(format_costs(each, show) for each in costs.values()), *gains)


def _cost_meaning(comparison: Comparison, measure: Measure) -> str:
    if not comparison.others:
        return f"{measure.meaning} Fewer is better."
    return (
        f"{measure.meaning} Fewer is better. Gain is the best other method’s {measure.unit} divided by "
        f"{comparison.hero}’s: 2.0× means that {comparison.hero} got there with half as many."
    )


def _cost_notes(comparison: Comparison, targets: Mapping[str, TierTargets], groups: Sequence[Group]) -> list[str]:
    cells = [text for group in groups for row in group.rows for text in row[1:]]
    notes = []
    if any(targets[tier].auto and targets[tier].percents for tier in comparison.tiers):
        auto = [tier for tier in comparison.tiers if targets[tier].auto]
        notes.append(f"Targets for {', '.join(auto)} by the paper’s rule: {AUTO_RULE}.")
    notes += note_interval(comparison.runs)
    if comparison.several_seeds:
        notes.append(SEEDS_TO_TARGET)
    if any(text.startswith(">") for text in cells):
        notes.append(LOWER_BOUND)
    if "–" in cells:
        notes.append(
            f"–: {comparison.hero} did not reach the target, another method’s run is too short to tell, or a method "
            "has no such tier."
        )
    return notes


def note_interval(runs: Sequence[Run]) -> list[str]:
    """Returns a note on the rounds between evaluations, if the runs were not evaluated in every round."""
    steps = sorted({run.settings.evaluation.every for run in runs})
    if steps in ([], [1]):
        return []
    every = " or ".join(map(str, steps))
    return [f"Evaluated every {every} rounds, so a target may have been reached up to {max(steps) - 1} rounds earlier."]


def make_outcome_table(comparison: Comparison) -> Table:
    """Makes a table of final and best accuracies by tier and owner, of parameters, and of the runs' costs."""

    def row(label: str, show: Callable[[Sequence[Run]], str]) -> tuple[str, ...]:
        return (label, *map(show, comparison.by_method.values()))

    groups = []
    for tier in comparison.tiers:
        rows = [
            row(f"{label}, {end}, %", _format_accuracy(tier, owner, pick))
            for owner, label in OWNER_LABELS.items()
            if any(owner in run.owners for run in comparison.runs)
            for end, pick in (("final", _last), ("best", max))
        ]
        if any(record.ensemble for run in comparison.runs for record in run.rounds):
            owner = choose_owner(comparison.runs, None)
            rows.append(row(f"{OWNER_LABELS[owner]}, exits together, final, %", _format_ensemble(tier, owner)))
        groups.append(Group(f"{tier} model", (*rows, row("parameters", _format_parameters(tier)))))
    took = [
        row("rounds", _format_rounds),
        row("bytes sent", _format_bytes),
        row("devices dropped", _count_devices("dropped")),
    ]
    if any(record.failed for run in comparison.runs for record in run.rounds):
        took.append(row("devices failed", _count_devices("failed")))
    groups.append(Group("run", (*took, row("seconds a round (median)", _format_seconds))))
    notes = [f"{SEEDS}."] if comparison.several_seeds else []
    return Table(
        name="outcome",
        title="Accuracy, size and effort",
        columns=("Measure", *map(comparison.heading, comparison.methods)),
        groups=tuple(groups),
        meaning="Accuracy on the test set after the last evaluated round (final) and at its highest (best). “All "
        "devices” averages the last model of every device of the tier, active or not: it is steadier, and what the "
        "paper reports. “Server” is the model that the server holds, made of the devices active in the round. A device "
        "is dropped from a round if its weights are not finite, and fails if its training raises an error.",
        notes=tuple(notes),
    )


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _format_accuracy(tier: str, owner: str, pick: Callable[[Sequence[float]], float]) -> Callable[[Sequence[Run]], str]:
    def show(runs: Sequence[Run]) -> str:
        curves = [[to_percent(accuracy) for _, accuracy in run.curve(tier, owner)] for run in runs]
        return format_spread([pick(curve) for curve in curves if curve], decimals=2)

    return show


def _format_ensemble(tier: str, owner: str) -> Callable[[Sequence[Run]], str]:
    def show(runs: Sequence[Run]) -> str:
        last = [[r.ensemble[owner] for r in run.rounds if r.ensemble][-1:] for run in runs]
        return format_spread([to_percent(found[0][tier]) for found in last if found and tier in found[0]], decimals=2)

    return show


def _format_parameters(tier: str) -> Callable[[Sequence[Run]], str]:
    def show(runs: Sequence[Run]) -> str:
        counts = sorted({run.summary.parameters[tier] for run in runs if run.summary and tier in run.tiers})
        return " or ".join(f"{count:,}" for count in counts) or "–"

    return show


def _format_rounds(runs: Sequence[Run]) -> str:
    if len(runs) == 1 and (not runs[0].is_complete or runs[0].damage):
        return f"{rounds_done(runs[0])} of {runs[0].settings.rounds}"
    done = [rounds_done(run) for run in runs]
    return str(done[0]) if len(set(done)) == 1 else f"{min(done)} to {max(done)}"


def _format_bytes(runs: Sequence[Run]) -> str:
    sent = [sum(run.bytes_sent[rounds_done(run)].values()) for run in runs if run.rounds]
    return BYTES.choose_format(sent)(sent) if sent else "–"


def _count_devices(outcome: Literal["dropped", "failed"]) -> Callable[[Sequence[Run]], str]:
    def show(runs: Sequence[Run]) -> str:
        devices = [sum(len(getattr(record, outcome)) for record in run.rounds) for run in runs]
        return format_spread(devices, decimals=0 if len(runs) == 1 else 1)

    return show


def _format_seconds(runs: Sequence[Run]) -> str:
    return format_spread([median(each.total for each in run.timing) for run in runs if run.timing], decimals=2)
