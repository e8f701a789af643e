"""Curves of a metric over what was spent, and how they look: a colour, a line style and a marker for each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple
from zlib import crc32

from fedhen.reports.costs import Spent
from fedhen.runs.reader import Run

BAND = "line: mean over the seeds, band: lowest to highest seed"
MARKERS_PER_LINE = 8
"""Approximate."""


class Look(NamedTuple):
    """How a curve is drawn. Dashes and marker distinguish methods without colours and in noisy curves."""

    colour: str
    """On white, as a key of DARK."""
    dashes: tuple[float, ...]
    """Lengths of dashes and gaps, in widths of the line; empty for a solid line."""
    marker: str
    """As matplotlib names it."""

    @property
    def dark(self) -> str:
        """The colour on a dark background."""
        return DARK[self.colour]


# Okabe and Ito's palette, which suits readers with any colour vision, without its yellow, too pale on white
DARK: Mapping[str, str] = {
    "#0072B2": "#4DA6E8",
    "#D55E00": "#F5853F",
    "#009E73": "#2EC799",
    "#CC79A7": "#E6A3C8",
    "#E69F00": "#F7C04A",
    "#56B4E9": "#A6DBFA",
    "#000000": "#FFFFFF",
}
"""Colour -> the colour in its place on a dark background."""
PAPER_LOOKS: Mapping[str, Look] = {
    "fedhen": Look("#0072B2", (), "o"),
    "noside": Look("#D55E00", (3.7, 1.6), "s"),
    "decouple": Look("#009E73", (6.4, 1.6, 1, 1.6), "^"),
}
COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "DvPX"
STYLES = ((1, 1.65), (5, 1, 1, 1, 1, 1), (8, 2), (3, 1))


@dataclass(frozen=True)
class Line:
    """A method's curve: what was spent, and the mean, lowest and highest value of its seeds, in the metric's unit."""

    rounds: list[int]
    spent: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def choose_looks(methods: Sequence[str]) -> dict[str, Look]:
    """Chooses distinct looks: fixed ones for the paper's methods, for others by the hash of their name."""
    chosen = {method: PAPER_LOOKS[method] for method in methods if method in PAPER_LOOKS}
    used: list[int] = []
    for method in sorted(set(methods) - set(PAPER_LOOKS)):
        start = crc32(method.encode())
        places = [(start + step) % len(COLOURS) for step in range(len(COLOURS))]
        place = min(places, key=used.count)
        # Methods that share a colour get different styles and markers.
        other = (place + used.count(place)) % len(COLOURS)
        chosen[method] = Look(COLOURS[place], STYLES[other], MARKERS[other])
        used.append(place)
    return chosen


def average_curves(runs: Sequence[Run], tier: str, owner: str, spent: Spent) -> Line:
    """Returns a method's curve over the rounds that all of its seeds evaluated."""
    curves = [(run, dict(run.curve(tier, owner))) for run in runs if run.curve(tier, owner)]
    common = sorted(set.intersection(*(set(curve) for _, curve in curves))) if curves else []
    scores = [[run.metric.scale(curve[number]) for run, curve in curves] for number in common]
    return Line(
        rounds=common,
        spent=[mean(spent(run, number, tier) for run, _ in curves) for number in common],
        mean=[mean(each) for each in scores],
        low=[min(each) for each in scores],
        high=[max(each) for each in scores],
    )
