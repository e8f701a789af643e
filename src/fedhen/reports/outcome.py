"""The table of what the runs ended with: final and best values, sizes and effort."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Literal

from fedhen.reports.comparison import Comparison, choose_owner, rounds_done
from fedhen.reports.costs import BYTES, Format, format_spread
from fedhen.reports.names import OWN_NAME, OWNER_LABELS, SEEDS, capitalise, label_owner
from fedhen.reports.rendering import Group, Table
from fedhen.runs.reader import Run
from fedhen.runs.records import MetricInfo, Values

Cell = Callable[[Sequence[Run]], str]
"""Writes the cell of a method from its runs."""
Row = tuple[str, Cell]

SCORES = (
    "{metric} on the test set after the last evaluated round (final) and at its {best} (best).{others} “All devices” "
    "averages the last model of every device of the tier, active or not: it is steadier, and what the paper reports. "
    "“Server” is the model that the server holds, made of the devices active in the round. "
)
OWN_SCORES = (
    "{metric} of the devices’ own models, each on its own test data, on average: after the last evaluated round "
    "(final) and at its {best} (best).{others} "
)
OTHERS = " Further metrics are those of the last evaluated round."
DEVICES = "A device is dropped from a round if its weights are not finite, and fails if its training raises an error."


def make_outcome_table(comparison: Comparison) -> Table:
    """Makes a table of the metrics by tier and owner, of parameters, and of the runs' costs."""
    groups = [
        Group(f"{tier} model", _make_rows(comparison, [*_list_scores(comparison, tier), _parameters(tier)]))
        for tier in comparison.tiers
    ]
    groups.append(Group("run", _make_rows(comparison, _list_effort(comparison))))
    metric, scored = comparison.metric, comparison.has_scores
    own = all(run.scores_own_models for run in comparison.runs)
    meaning = (OWN_SCORES if own else SCORES).format(
        metric=capitalise(metric.title),
        best="highest" if metric.higher_is_better else "lowest",
        others=OTHERS if comparison.other_metrics else "",
    )
    return Table(
        name="outcome",
        title=f"{capitalise(metric.title)}, size and effort" if scored else "Size and effort",
        columns=("Measure", *map(comparison.heading, comparison.methods)),
        groups=tuple(groups),
        meaning=(meaning if scored else "") + DEVICES,
        notes=(*([f"{SEEDS}."] if comparison.several_seeds else []), *_note_own_models(comparison)),
    )


def _note_own_models(comparison: Comparison) -> Iterator[str]:
    """Yields whose scores are those of the server, where only some of the servers have a whole model."""
    own = {run.method: run.scores_own_models for run in comparison.runs}
    if any(own.values()) and not all(own.values()):
        yield f"Of {', '.join(method for method in own if own[method])}, “server” is the mean of the {OWN_NAME}."


def _make_rows(comparison: Comparison, rows: Iterable[Row]) -> tuple[tuple[str, ...], ...]:
    return tuple((label, *map(show, comparison.by_method.values())) for label, show in rows)


def _list_scores(comparison: Comparison, tier: str) -> Iterator[Row]:
    """Yields the rows of a tier's metrics, the primary one first; none if the runs have no scores."""
    if not comparison.has_scores:
        return
    metric, label = comparison.metric, partial(label_owner, comparison.runs)
    owners = [owner for owner in OWNER_LABELS if any(owner in run.owners for run in comparison.runs)]
    for owner in owners:
        yield f"{label(owner)}, final{_unit(metric)}", _final(metric, tier, owner)
        yield f"{label(owner)}, best{_unit(metric)}", _best(metric, tier, owner)
    if any(record.ensemble for run in comparison.runs for record in run.rounds):
        owner = choose_owner(comparison.runs, None)
        yield f"{label(owner)}, exits together, final{_unit(metric)}", _together(metric, tier, owner)
    for other in comparison.other_metrics:
        for owner in owners:
            yield f"{label(owner)}, {other.title}, final{_unit(other)}", _final(other, tier, owner)


def _unit(metric: MetricInfo) -> str:
    return f", {metric.unit}" if metric.unit else ""


def _final(metric: MetricInfo, tier: str, owner: str) -> Cell:
    def show(runs: Sequence[Run]) -> str:
        found = [_list_values(run, metric, tier, owner) for run in runs]
        return _format_values(metric, [values[-1] for values in found if values])

    return show


def _best(metric: MetricInfo, tier: str, owner: str) -> Cell:
    def show(runs: Sequence[Run]) -> str:
        found = [values for run in runs if (values := _list_values(run, metric, tier, owner))]
        finite = [[value for value in values if value is not None] for values in found]
        return _format_values(metric, [metric.best(values) if values else None for values in finite])

    return show


def _together(metric: MetricInfo, tier: str, owner: str) -> Cell:
    def show(runs: Sequence[Run]) -> str:
        last = [[record.ensemble for record in run.rounds if record.ensemble][-1:] for run in runs]
        return _format_values(metric, [v[owner][tier] for found in last for v in found if tier in v[owner]])

    return show


def _list_values(run: Run, metric: MetricInfo, tier: str, owner: str) -> list[float | None]:
    """Returns a metric's values in all evaluated rounds, None where it is not finite."""
    if tier not in run.tiers or owner not in run.owners or metric not in run.metrics:
        return []
    found: list[Values] = [values for record in run.rounds if (values := record.values(metric.name))]
    return [values[owner][tier] for values in found]


def _format_values(metric: MetricInfo, values: Sequence[float | None]) -> str:
    """Writes recorded values of several seeds: percents with two decimals, others with four significant digits."""
    finite = [metric.scale(value) for value in values if value is not None]
    if len(finite) < len(values):
        return "not finite" if len(values) == 1 else f"{len(values) - len(finite)} of {len(values)} not finite"
    return choose_format(metric, finite)(finite)


def choose_format(metric: MetricInfo, values: Sequence[float]) -> Format:
    """Returns the format of values in the metric's unit: two decimals of percents, else four digits of the largest."""
    if metric.unit == "%":
        return partial(format_spread, decimals=2)
    digits = math.floor(math.log10(max(map(abs, values), default=0) or 1))
    few = -4 <= digits <= 5
    return partial(format_spread, decimals=max(0, 3 - digits) if few else 3, kind="f" if few else "e")


def _parameters(tier: str) -> Row:
    def show(runs: Sequence[Run]) -> str:
        counts = sorted({run.summary.parameters[tier] for run in runs if run.summary and tier in run.tiers})
        return " or ".join(f"{count:,}" for count in counts) or "–"

    return "parameters", show


def _list_effort(comparison: Comparison) -> Iterator[Row]:
    yield "rounds", _format_rounds
    yield "bytes sent", _format_bytes
    yield "devices dropped", _count_devices("dropped")
    if any(record.failed for run in comparison.runs for record in run.rounds):
        yield "devices failed", _count_devices("failed")
    yield "seconds a round (median)", _format_seconds


def _format_rounds(runs: Sequence[Run]) -> str:
    if len(runs) == 1 and (not runs[0].is_complete or runs[0].damage):
        return f"{rounds_done(runs[0])} of {runs[0].length}"
    done = [rounds_done(run) for run in runs]
    return str(done[0]) if len(set(done)) == 1 else f"{min(done)} to {max(done)}"


def _format_bytes(runs: Sequence[Run]) -> str:
    sent = [sum(run.bytes_sent[rounds_done(run)].values()) for run in runs if run.rounds]
    return BYTES.choose_format(sent)(sent) if sent else "–"


def _count_devices(outcome: Literal["dropped", "failed"]) -> Cell:
    def show(runs: Sequence[Run]) -> str:
        devices = [sum(len(getattr(record, outcome)) for record in run.rounds) for run in runs]
        return format_spread(devices, decimals=0 if len(runs) == 1 else 1)

    return show


def _format_seconds(runs: Sequence[Run]) -> str:
    return format_spread([median(each.total for each in run.timing) for run in runs if run.timing], decimals=2)
