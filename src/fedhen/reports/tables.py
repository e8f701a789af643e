"""The tables of a report: what the runs spent to reach targets, and their outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from fedhen.reports.comparison import Comparison
from fedhen.reports.costs import (
    BYTES,
    OWN_BYTES,
    ROUNDS,
    Goal,
    Measure,
    format_costs,
    gain,
    measure_cost,
)
from fedhen.reports.early_exits import EarlyExits
from fedhen.reports.names import GAIN, LOWER_BOUND, SEEDS_TO_TARGET, capitalise, name_owner
from fedhen.reports.outcome import make_outcome_table
from fedhen.reports.own_data import has_own_values, make_own_tables
from fedhen.reports.participation import make_participation_table
from fedhen.reports.rendering import Group, Table
from fedhen.reports.spending_tables import PricedRuns
from fedhen.reports.targets import TierTargets, describe_auto_rule, format_target
from fedhen.runs.reader import Run
from fedhen.runs.records import ACCURACY


def make_tables(
    comparison: Comparison, targets: Mapping[str, TierTargets], owner: str, priced: PricedRuns | None = None
) -> tuple[Table, ...]:
    """Makes the tables of a report. Without scores there are no targets to reach, only the outcome."""
    by_profile = priced.measures() if priced else ()
    measures = (ROUNDS, BYTES, OWN_BYTES, *by_profile) if comparison.has_scores else ()
    costs = (make_cost_table(comparison, targets, owner, measure) for measure in measures)
    spending = (priced.make_table(comparison), make_participation_table(comparison, priced)) if priced else ()
    own = make_own_tables(comparison) if has_own_values(comparison) else ()
    exits = EarlyExits(comparison)
    early = (exits.table(),) if exits else ()
    return (*costs, *spending, make_outcome_table(comparison), *own, *early)


def make_cost_table(comparison: Comparison, targets: Mapping[str, TierTargets], owner: str, measure: Measure) -> Table:
    """Makes a table in the paper's layout: tiers, a row per target, a column per method, and the hero's gain."""
    gains = (GAIN,) if comparison.others else ()
    groups = []
    for tier in comparison.tiers:
        goals = [Goal(tier, target, owner) for target in targets[tier].values]
        rows = tuple(_cost_row(comparison, goal, measure) for goal in goals)
        groups.append(Group(f"{tier} model", rows))
    return Table(
        name=measure.table,
        title=f"{capitalise(measure.noun)} to target ({name_owner(comparison.runs, owner)})",
        columns=(capitalise(comparison.metric.title), *map(comparison.heading, comparison.methods), *gains),
        groups=tuple(groups),
        meaning=_cost_meaning(comparison, measure),
        # The first table says how all targets were chosen.
        notes=(*(_target_notes(comparison, targets) if measure is ROUNDS else ()), *_cost_notes(comparison, groups)),
        strong=GAIN,
    )


def _cost_row(comparison: Comparison, goal: Goal, measure: Measure) -> tuple[str, ...]:
    costs = {
        name: [measure_cost(run, goal, measure.spent) for run in runs] for name, runs in comparison.by_method.items()
    }
    show = measure.choose_format([each.amount for each in chain.from_iterable(costs.values()) if each.exact])
    baselines = [costs[name] for name in comparison.others]
    gains = [gain(costs[comparison.hero], baselines)] if baselines else []
    return (
        format_target(comparison.metric, goal.target),
        *(format_costs(each, show) for each in costs.values()),
        *gains,
    )


def _cost_meaning(comparison: Comparison, measure: Measure) -> str:
    meaning = measure.explain(comparison.metric)
    if not comparison.others:
        return f"{meaning} Fewer is better."
    return (
        f"{meaning} Fewer is better. Gain is the best other method’s {measure.unit} divided by "
        f"{comparison.hero}’s: 2.0× means that {comparison.hero} got there with half as many."
    )


def _target_notes(comparison: Comparison, targets: Mapping[str, TierTargets]) -> list[str]:
    notes = []
    if any(targets[tier].auto and targets[tier].values for tier in comparison.tiers):
        auto = [tier for tier in comparison.tiers if targets[tier].auto]
        whose = "the paper’s rule" if comparison.metric == ACCURACY else "rule"
        notes.append(f"Targets for {', '.join(auto)} by {whose}: {describe_auto_rule(comparison.metric)}.")
    return [*notes, *note_interval(comparison.runs)]


def _cost_notes(comparison: Comparison, groups: Sequence[Group]) -> list[str]:
    cells = [text for group in groups for row in group.rows for text in row[1:]]
    notes = []
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
    earlier = max(steps) - 1
    rounds = f"{earlier} round{'s' * (earlier > 1)}"
    return [f"Evaluated every {every} rounds, so a target may have been reached up to {rounds} earlier."]
