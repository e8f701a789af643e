"""The paper's centralised references: the same models trained in one place."""

from __future__ import annotations

from fedhen.reports.costs import format_spread
from fedhen.reports.names import SEEDS
from fedhen.reports.paper.selection import NOT_RUN, Selection, format_fraction, format_unfinished
from fedhen.reports.paper.values import CENTRALISED_PERCENT, CITATION, DATA_SETS, TIERS, Reference
from fedhen.reports.rendering import Group, Table
from fedhen.runs.records import ACCURACY


def make_centralised_table(selection: Selection) -> Table:
    """Makes a table of the accuracy of each tier's model trained on all of the data, or on half, in one place."""
    groups = []
    for tier in TIERS:
        places = [place for place in CENTRALISED_PERCENT if place[1] == tier]
        groups.append(Group(f"{tier} model", tuple(_make_row(selection, place) for place in places)))
    counts = sorted({len(runs) for runs in selection.centralised.values()} - {0})
    several = [f"{SEEDS}, n = {' or '.join(map(str, counts))}."] if counts and counts[-1] > 1 else []
    title = "Centralised training: test accuracy, ours (the paper’s)"
    meaning = (
        "Test accuracy in percent of the same models trained in one place, on all training images or on half of them, "
        "as many as 50 devices hold: after the last epoch (in parentheses the paper’s value), and at its highest."
    )
    return Table(
        name="centralised",
        title=title,
        columns=("Dataset", "Training data", "Final, %", "Best, %"),
        groups=tuple(groups),
        meaning=meaning,
        notes=(f"In parentheses: Section “Experiments”, “Models”, of {CITATION}.", *several),
        merged=True,
        caption=f"{title}. {meaning}",
    )


def _make_row(selection: Selection, place: Reference) -> tuple[str, ...]:
    data, _, fraction = place
    final, best = reference_percents(selection, place)
    waiting = [format_unfinished(run) for run in selection.centralised[place]] or [NOT_RUN]
    printed = f"({CENTRALISED_PERCENT[place]:g})"
    own = format_spread(final, decimals=2) if final else waiting[0]
    return (DATA_SETS[data], format_fraction(fraction), f"{own} {printed}", format_spread(best, decimals=2))


def reference_percents(selection: Selection, place: Reference) -> tuple[list[float], list[float]]:
    """Returns the final and the best accuracy of each finished run of a centralised reference."""
    runs = (run for run in selection.centralised[place] if run.summary is not None)
    curves = [[ACCURACY.scale(accuracy) for _, accuracy in run.curve(place[1], "server")] for run in runs]
    return [curve[-1] for curve in curves if curve], [max(curve) for curve in curves if curve]
