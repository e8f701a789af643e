"""The paper's yardsticks: the same models trained in one place, our accuracies beside its own."""

from __future__ import annotations

from fedhen.reports.costs import spread
from fedhen.reports.paper.runs import NOT_RUN, Found, amount, unfinished
from fedhen.reports.paper.values import CENTRALISED_PERCENT, CITATION, DATA_SETS, TIERS, Reference
from fedhen.reports.rendering import Group, Table
from fedhen.reports.tables import SEEDS
from fedhen.reports.targets import percent


def centralised_table(found: Found) -> Table:
    """The paper's yardsticks: the accuracy of each tier's model trained in one place, on all of the data or on half."""
    groups = []
    for tier in TIERS:
        places = [place for place in CENTRALISED_PERCENT if place[1] == tier]
        groups.append(Group(f"{tier} model", tuple(_reference_row(found, place) for place in places)))
    counts = sorted({len(runs) for runs in found.centralised.values()} - {0})
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


def _reference_row(found: Found, place: Reference) -> tuple[str, ...]:
    data, _, fraction = place
    final, best = reference_percents(found, place)
    waiting = [unfinished(run) for run in found.centralised[place]] or [NOT_RUN]
    printed = f"({CENTRALISED_PERCENT[place]:g})"
    own = spread(final, decimals=2) if final else waiting[0]
    return (DATA_SETS[data], amount(fraction), f"{own} {printed}", spread(best, decimals=2))


def reference_percents(found: Found, place: Reference) -> tuple[list[float], list[float]]:
    """The last and the best accuracy of each finished run of a centralised reference."""
    runs = (run for run in found.centralised[place] if run.summary is not None)
    curves = [[percent(accuracy) for _, accuracy in run.curve(place[1], "server")] for run in runs]
    return [curve[-1] for curve in curves if curve], [max(curve) for curve in curves if curve]
