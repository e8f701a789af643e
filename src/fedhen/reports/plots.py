"""What a chart of curves shows, and where its parts are in an SVG element, which templates/plot.html writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fedhen.reports.curves import MARKERS_PER_LINE, Line, Look

WIDTH, HEIGHT, TOP, BOTTOM = 400, 240, 10, 24
"""Of the SVG element and its margins, in its own units."""
LETTER = 6.6
"""Width of a digit in these units, for a text of 12."""
TICKS = 6
"""Most steps between the ticks of an axis."""
MARKERS = {
    "o": "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z",
    "s": "m-3-3h6v6h-6z",
    "^": "m0-3.6l3.5 6.2h-7z",
    "v": "m0 3.6l3.5-6.2h-7z",
    "D": "m0-4l4 4l-4 4l-4-4z",
    "P": "m-1.2-3.5h2.4v2.3h2.3v2.4h-2.3v2.3h-2.4v-2.3h-2.3v-2.4h2.3z",
    "X": "m-3-1.6l1.4-1.4l1.6 1.6l1.6-1.6l1.4 1.4l-1.6 1.6l1.6 1.6l-1.4 1.4l-1.6-1.6l-1.6 1.6l-1.4-1.4l1.6-1.6z",
}
"""Marker -> its outline around a point, as an SVG path."""


@dataclass(frozen=True)
class Curve:
    """A named curve, with the amounts in the unit of the axis."""

    name: str
    look: Look
    line: Line

    @property
    def key(self) -> str:
        """The marker in a legend, as an SVG path."""
        return f"M16 6{MARKERS[self.look.marker]}"


@dataclass(frozen=True)
class Level:
    """A horizontal line with a label at its right end."""

    value: float
    label: str
    dashes: tuple[float, ...] = (1, 2)


@dataclass(frozen=True)
class Plot:
    """Curves of one metric over one measure. All plots of a figure have the same curves, of which some may be empty."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    levels: Sequence[Level] = ()
    whole: bool = False
    """Whether amounts are whole numbers."""
    excuse: str = ""
    """Why there is no curve."""
    note: str = ""
    """Below the axis."""
    x_end: float | None = None
    y_limits: tuple[float, float] | None = None

    @cached_property
    def rounds(self) -> list[int]:
        """The rounds of all points."""
        return sorted({number for curve in self.curves for number in curve.line.rounds})

    def list_rows(self, curve: Curve) -> str:
        """Returns for each point of a curve the place of its round in `rounds`."""
        places = {number: place for place, number in enumerate(self.rounds)}
        return " ".join(str(places[number]) for number in curve.line.rounds)

    @cached_property
    def _x_end(self) -> float:
        return self.x_end or max((curve.line.spent[-1] for curve in self.curves if curve.line.spent), default=1)

    @cached_property
    def _y_limits(self) -> tuple[float, float]:
        values = [v for curve in self.curves for v in (*curve.line.low, *curve.line.high)]
        values += [level.value for level in self.levels]
        low, high = min(values, default=0), max(values, default=1)
        margin = (high - low) / 20 or abs(high) / 20 or 1
        return self.y_limits or (low - margin, high + margin)

    @cached_property
    def y_ticks(self) -> list[tuple[float, str]]:
        """Places and labels."""
        return [(self._y(value), label) for value, label in choose_ticks(*self._y_limits)]

    @cached_property
    def x_ticks(self) -> list[tuple[float, str]]:
        """Places and labels."""
        return [(self._x(value), label) for value, label in choose_ticks(0, self._x_end, self.whole)]

    @cached_property
    def left(self) -> float:
        """Where the vertical axis is."""
        return round(12 + LETTER * max((len(label) for _, label in choose_ticks(*self._y_limits)), default=0))

    @cached_property
    def right(self) -> float:
        """Where the horizontal axis ends."""
        return round(WIDTH - 8 - max(8, LETTER * max((len(level.label) for level in self.levels), default=0)))

    @property
    def bottom(self) -> float:
        """Where the horizontal axis is."""
        return HEIGHT - BOTTOM

    @property
    def top(self) -> float:
        return TOP

    @property
    def size(self) -> tuple[int, int]:
        return WIDTH, HEIGHT

    def _x(self, amount: float) -> float:
        return round(self.left + (self.right - self.left) * amount / self._x_end, 1)

    def _y(self, value: float) -> float:
        low, high = self._y_limits
        return round(self.bottom - (self.bottom - TOP) * (value - low) / (high - low), 1)

    def place_levels(self) -> list[tuple[Level, float, float]]:
        """Returns each level with the heights of its line and of its label. Labels do not overlap."""
        placed: list[tuple[Level, float, float]] = []
        for level in sorted(self.levels, key=lambda level: -level.value):
            height = self._y(level.value)
            placed.append((level, height, max(height + 4, placed[-1][2] + 12 if placed else 0)))
        return placed

    def trace(self, curve: Curve) -> str:
        """Returns the points of a curve."""
        return self._join(curve.line.spent, curve.line.mean)

    def band(self, curve: Curve) -> str:
        """Returns the outline between the lowest and the highest seed, or nothing if they are the same."""
        line = curve.line
        there_and_back = [*line.spent, *line.spent[::-1]], [*line.low, *line.high[::-1]]
        return self._join(*there_and_back) if line.low != line.high else ""

    def mark(self, curve: Curve) -> str:
        """Returns the markers on a curve, as an SVG path."""
        every = max(1, len(curve.line.spent) // MARKERS_PER_LINE)
        points = self.trace(curve).split()[::every]
        return "".join(f"M{point}{MARKERS[curve.look.marker]}" for point in points)

    def _join(self, amounts: Sequence[float], values: Sequence[float]) -> str:
        return " ".join(f"{self._x(a):g},{self._y(v):g}" for a, v in zip(amounts, values, strict=True))


def choose_ticks(low: float, high: float, whole: bool = False) -> list[tuple[float, str]]:
    """Returns round numbers between two others, 1, 2 or 5 times a power of ten apart, and their labels."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= rough * (1 - 1e-9))
    step = max(1.0, step) if whole else step
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    large = not 1e-4 <= step < 1e6
    return [(n * step, f"{n * step:.3g}" if large else f"{n * step:.{decimals}f}") for n in numbers]
