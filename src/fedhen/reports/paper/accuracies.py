"""The best accuracies of the paper's experiments, compared with its text and with centralised training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from fedhen.reports.costs import Outcome, format_spread
from fedhen.reports.names import OWNER_NAMES, SEEDS
from fedhen.reports.paper.centralised import reference_percents
from fedhen.reports.paper.selection import NOT_RUN, Selection, format_unfinished
from fedhen.reports.paper.tables import HERO
from fedhen.reports.paper.values import (
    BEST_PERCENT,
    CENTRALISED_PERCENT,
    CITATION,
    DATA_SETS,
    LEAD,
    METHODS,
    SPLITS,
    TIERS,
    Split,
)
from fedhen.reports.rendering import Group, Table
from fedhen.runs.reader import Run
from fedhen.runs.records import ACCURACY


def make_accuracy_table(selection: Selection, owner: str) -> Table:
    """Makes a table of each method's best accuracy, FedHeN's lead, and the accuracy of centralised training."""
    title = "Best accuracy in percent, ours (the paper’s)"
    meaning = (
        f"The highest test accuracy in percent of a tier’s model ({OWNER_NAMES[owner]}). Lead is {HERO}’s over the "
        "best other method’s, in points. Centralised: after the last epoch on all training images."
    )
    groups = [
        Group(
            f"{tier} model",
            tuple(_make_row(selection, owner, tier, data, split) for data in DATA_SETS for split in SPLITS),
        )
        for tier in TIERS
    ]
    several = [f"{SEEDS}."] if any(len(runs) > 1 for runs in selection.federated.values()) else []
    return Table(
        name="accuracies",
        title=title,
        columns=("Dataset", "Split", *METHODS.values(), "Lead", "Centralised"),
        groups=tuple(groups),
        meaning=meaning,
        notes=(f"In parentheses: Section “Experiments” of {CITATION}.", *several),
        strong="Lead",
        merged=True,
        caption=f"{title}. {meaning}",
    )


def _make_row(selection: Selection, owner: str, tier: str, data: str, split: Split) -> tuple[str, ...]:
    recipe = split.recipes[data]
    runs = {method: selection.federated[recipe, method] for method in METHODS}
    best = {method: _best_percents(each, tier, owner) for method, each in runs.items()}
    cells = [_format_cell(runs[method], best[method]) for method in METHODS]
    cells[0] += _format_printed(BEST_PERCENT.get((recipe, tier)))
    central, _ = reference_percents(selection, (data, tier, 1.0))
    yardstick = (format_spread(central, decimals=2) if central else NOT_RUN) + _format_printed(
        CENTRALISED_PERCENT[data, tier, 1.0]
    )
    return (
        DATA_SETS[data],
        split.name,
        *cells,
        _format_lead(best) + _format_printed(LEAD.get((recipe, tier))),
        yardstick,
    )


def _best_percents(runs: Sequence[Run], tier: str, owner: str) -> list[float]:
    """Returns the best accuracy of each run; empty unless all are finished and undamaged."""
    if any(run.summary is None or run.damage for run in runs):
        return []
    curves = [run.curve(tier, owner) for run in runs]
    return [max(ACCURACY.scale(accuracy) for _, accuracy in curve) for curve in curves if curve]


def _format_cell(runs: Sequence[Run], best: Sequence[float]) -> str:
    if not runs:
        return NOT_RUN
    waiting = [run for run in runs if run.summary is None]
    if waiting:
        return format_unfinished(waiting[0])
    # The best round may be among the lost ones.
    return str(Outcome.DAMAGED) if any(run.damage for run in runs) else format_spread(best, decimals=2)


def _format_lead(best: Mapping[str, Sequence[float]]) -> str:
    if not all(best.values()):
        return "–"
    hero, *others = (mean(each) for each in best.values())
    return f"{hero - max(others):.1f}"


def _format_printed(value: float | str | None) -> str:
    return "" if value is None else f" ({value})" if isinstance(value, str) else f" ({value:g})"
