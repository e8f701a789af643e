"""Curves of how a value is spread over devices: sorted, over the share of the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedhen.reports.comparison import Comparison
from fedhen.reports.curves import Line
from fedhen.reports.plots import Plot
from fedhen.reports.rendering import Group, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP = 5
"""Percent of the devices between two points of a curve."""


@dataclass(frozen=True)
class SpreadChart:
    """A plot of such curves for each tier."""

    comparison: Comparison

    @property
    def seeds(self) -> str:
        """What a caption adds if there are several seeds."""
        return " The devices of all seeds together." if self.comparison.several_seeds else ""

    @property
    def plots(self) -> tuple[Plot, ...]:
        return tuple(map(self.plot, self.comparison.tiers))

    def plot(self, tier: str) -> Plot:
        raise NotImplementedError

    def figure(self) -> Figure:
        from fedhen.reports.figures import draw_plots

        return draw_plots(self.plots)


def make_line(values: Sequence[float]) -> Line:
    """Returns the quantiles of sorted values as a curve."""
    shares = list(range(0, 101, STEP)) if values else []
    middle = [find_quantile(values, share / 100) for share in shares]
    return Line(rounds=shares, spent=[float(share) for share in shares], mean=middle, low=middle, high=middle)


def find_quantile(values: Sequence[float], share: float) -> float:
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def list_points(name: str, plots: Sequence[Plot], show: Callable[[Sequence[float]], str]) -> Table:
    """Makes a table of every point of such curves; a group for each plot."""
    groups = []
    for plot in plots:
        rows = [
            (f"{share} %", *(show(curve.line.mean[at : at + 1]) for curve in plot.curves))
            for at, share in enumerate(range(0, 101, STEP))
        ]
        groups.append(Group(plot.title, tuple(rows)))
    names = [curve.name for curve in plots[0].curves]
    return Table(name, "Values of the curves", ("Share of devices", *names), tuple(groups), "")
