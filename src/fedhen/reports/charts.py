"""Charts of a report: the primary metric over rounds and bytes, a plot for each tier and a curve for each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from fedhen.reports.comparison import Comparison, is_evaluated
from fedhen.reports.costs import Measure
from fedhen.reports.curves import BAND, average_curves, choose_looks
from fedhen.reports.names import capitalise, name_owner
from fedhen.reports.outcome import choose_format
from fedhen.reports.plots import Curve, Level, Plot
from fedhen.reports.rendering import Group, Table
from fedhen.reports.targets import TierTargets, format_target
from fedhen.runs.records import MetricInfo

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Chart:
    """The primary metric over what was spent, for any of the tiers."""

    comparison: Comparison
    targets: Mapping[str, TierTargets]
    owner: str
    measure: Measure

    @property
    def title(self) -> str:
        return f"{capitalise(self.comparison.metric.title)} over {self.measure.noun}"

    @property
    def caption(self) -> str:
        seeds = f" {BAND.capitalize()}." if self.comparison.several_seeds else ""
        metric = self.comparison.metric
        lower = "" if metric.higher_is_better else " Lower is better."
        return (
            f"Test {metric.title} of the {name_owner(self.comparison.runs, self.owner)}.{lower}{seeds} Dotted: targets."
        )

    @cached_property
    def plots(self) -> tuple[Plot, ...]:
        """A plot for each tier."""
        return tuple(map(self._plot, self.comparison.tiers))

    def figure(self, tiers: Sequence[str]) -> Figure:
        """Draws the plots of some tiers for a file, with a common legend."""
        from fedhen.reports.figures import draw_plots

        plots = [plot for plot, tier in zip(self.plots, self.comparison.tiers, strict=True) if tier in tiers]
        return draw_plots(plots, BAND if self.comparison.several_seeds else "")

    def _plot(self, tier: str) -> Plot:
        looks = choose_looks(self.comparison.methods)
        lines = {
            method: average_curves(runs, tier, self.owner, self.measure.spent)
            for method, runs in self.comparison.by_method.items()
        }
        furthest = max((each.spent[-1] for each in lines.values() if each.spent), default=0)
        size, label = self.measure.axis(furthest)
        metric = self.comparison.metric
        return Plot(
            title=f"{tier} model",
            x_label=label,
            y_label=self._axis_label,
            curves=[
                Curve(self._label(method), looks[method], replace(line, spent=[each / size for each in line.spent]))
                for method, line in lines.items()
            ],
            levels=[Level(target, _drop_unit(metric, target)) for target in self.targets[tier].values],
            whole=self.measure.whole,
            excuse="" if furthest else self._excuse(tier),
        )

    @property
    def _axis_label(self) -> str:
        metric = self.comparison.metric
        unit = f", {metric.unit}" if metric.unit else ""
        lower = "" if metric.higher_is_better else "; lower is better"
        return f"test {metric.title}{unit} ({name_owner(self.comparison.runs, self.owner)}){lower}"

    def _excuse(self, tier: str) -> str:
        """Returns why the plot of a tier has no curve."""
        some = any(is_evaluated(run) for run in self.comparison.runs if tier in run.tiers)
        return "no finite value" if some else "no evaluated round yet"

    def _label(self, method: str) -> str:
        # A method without a curve in one plot may lack that tier; without any curve, it is not evaluated yet.
        some = any(map(is_evaluated, self.comparison.by_method[method]))
        return method if some else f"{method} (not evaluated)"


def _drop_unit(metric: MetricInfo, target: float) -> str:
    return format_target(metric, target).removesuffix(metric.unit).strip()


def list_values(plots: Sequence[Plot], metric: MetricInfo) -> Table:
    """Makes a table of every point of the curves: rows are rounds, columns are curves, groups are plots."""
    groups = []
    for plot in plots:
        columns = [_list_cells(plot, curve, metric) for curve in plot.curves]
        rows = tuple((str(number), *(cells.get(number, "–") for cells in columns)) for number in plot.rounds)
        groups.append(Group(plot.title, rows))
    several = any(curve.line.low != curve.line.high for plot in plots for curve in plot.curves)
    return Table(
        name="values",
        title=f"Values of the curves: {metric.title}{f', {metric.unit}' if metric.unit else ''}",
        columns=("Round", *(curve.name for curve in plots[0].curves)),
        groups=tuple(groups),
        meaning="",
        notes=("Mean over the seeds, with the lowest and the highest seed.",) if several else (),
    )


def _list_cells(plot: Plot, curve: Curve, metric: MetricInfo) -> dict[int, str]:
    """Returns round -> the value, with its range if there are several seeds, and what was spent unless it is rounds."""
    line, cells = curve.line, {}
    for number, spent, middle, low, high in zip(line.rounds, line.spent, line.mean, line.low, line.high, strict=True):
        show = choose_format(metric, (middle, low, high))
        span = f" ({show([low])} to {show([high])})" if line.low != line.high else ""
        cost = "" if plot.whole else f", {spent:.3g} {plot.x_label.split()[0]}"
        cells[number] = f"{show([middle])}{span}{cost}"
    return cells
