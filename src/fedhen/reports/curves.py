"""Charts of the primary metric over rounds and bytes, with a panel per tier and a colour and line style per method."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any
from zlib import crc32

from fedhen.fileio.atomic import write_text
from fedhen.reports.comparison import Comparison, is_evaluated
from fedhen.reports.costs import Measure, Spent
from fedhen.reports.names import OWNER_NAMES, capitalise
from fedhen.reports.targets import TierTargets, format_target
from fedhen.runs.reader import Run
from fedhen.runs.records import MetricInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Look = tuple[str, Any, str]
"""A colour, a line style and a marker. The last two distinguish methods without colours and in noisy curves."""

# Okabe and Ito's palette, which suits readers with any colour vision, without its yellow, too pale on white
PAPER_LOOKS: Mapping[str, Look] = {
    "fedhen": ("#0072B2", "-", "o"),
    "noside": ("#D55E00", "--", "s"),
    "decouple": ("#009E73", "-.", "^"),
}
COLOURS = ("#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "DvPX"
STYLES: tuple[Any, ...] = (":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (3, 1)))
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.facecolor": "white",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.constrained_layout.w_pad": 0.08,
    "text.parse_math": False,  # a dollar sign in a name does not start a formula
}
MARKERS_PER_LINE = 8
"""Approximate."""
PNG_DPI = 150
BAND = "line: mean over the seeds, band: lowest to highest seed"
PANELS_PER_ROW = 4


@dataclass(frozen=True)
class Line:
    """A method's curve: what was spent, and the mean, lowest and highest value of its seeds, in the metric's unit."""

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
        chosen[method] = (COLOURS[place], STYLES[other], MARKERS[other])
        used.append(place)
    return chosen


def average_curves(runs: Sequence[Run], tier: str, owner: str, spent: Spent) -> Line:
    """Returns a method's curve over the rounds that all of its seeds evaluated."""
    curves = [(run, dict(run.curve(tier, owner))) for run in runs if run.curve(tier, owner)]
    common = sorted(set.intersection(*(set(curve) for _, curve in curves))) if curves else []
    scores = [[run.metric.scale(curve[number]) for run, curve in curves] for number in common]
    return Line(
        spent=[mean(spent(run, number, tier) for run, _ in curves) for number in common],
        mean=[mean(each) for each in scores],
        low=[min(each) for each in scores],
        high=[max(each) for each in scores],
    )


@dataclass(frozen=True)
class Chart:
    """The primary metric over what was spent, for any of the tiers."""

    comparison: Comparison
    targets: Mapping[str, TierTargets]
    owner: str
    measure: Measure

    @property
    def title(self) -> str:
        return f"{capitalise(self.comparison.metric.name)} over {self.measure.noun}"

    @property
    def caption(self) -> str:
        seeds = f" {BAND.capitalize()}." if self.comparison.several_seeds else ""
        metric = self.comparison.metric
        lower = "" if metric.higher_is_better else " Lower is better."
        return f"Test {metric.name} of the {OWNER_NAMES[self.owner]}.{lower}{seeds} Dotted: targets."

    def figure(self, tiers: Sequence[str]) -> Figure:
        """Draws one panel per tier, with a common legend."""
        import matplotlib
        from matplotlib.figure import Figure

        rows = -(-len(tiers) // PANELS_PER_ROW)
        across = min(len(tiers), PANELS_PER_ROW)
        width = 0.5 + 3.7 * across
        inches = 0.75 + 0.078 * max(
            len(self._label(method)) for method in self.comparison.methods
        )  # of a legend's entry
        columns = max(1, min(len(self.comparison.methods), int((width + 0.2) / inches)))
        below = -(-len(self.comparison.methods) // columns)
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(width, 3.2 * rows + 0.2 * below), layout="constrained")
            panels = figure.subplots(rows, across, squeeze=False).flat
            for panel, tier in zip(panels, tiers, strict=False):
                self._draw(panel, tier)
            for panel in list(panels)[len(tiers) :]:
                panel.set_visible(False)
            handles, labels = figure.axes[0].get_legend_handles_labels()
            figure.legend(
                handles,
                labels,
                loc="outside lower center",
                ncols=columns,
                frameon=False,
                handlelength=3,
                title=BAND if self.comparison.several_seeds else None,
                title_fontsize=8,
            )
        return figure

    def _draw(self, panel: Axes, tier: str) -> None:
        lines = {
            m: average_curves(runs, tier, self.owner, self.measure.spent)
            for m, runs in self.comparison.by_method.items()
        }
        furthest = max((each.spent[-1] for each in lines.values() if each.spent), default=0)
        size, label = self.measure.axis(furthest)
        for place, (method, each) in enumerate(lines.items()):
            self._plot(panel, method, each, size).set_zorder(10 - place)  # the hero on top
        if furthest:
            panel.set_xlim(left=0)
        else:
            panel.text(0.5, 0.5, self._excuse(tier), transform=panel.transAxes, ha="center", color="0.4")
        _draw_targets(panel, self.comparison.metric, self.targets[tier].values)
        panel.set_title(f"{tier} model", fontsize=10)
        panel.set_xlabel(label)
        panel.set_ylabel(self._axis_label, fontsize=8)
        style_axes(panel)

    @property
    def _axis_label(self) -> str:
        metric = self.comparison.metric
        unit = f", {metric.unit}" if metric.unit else ""
        lower = "" if metric.higher_is_better else "\nlower is better"
        return f"test {metric.name}{unit} ({OWNER_NAMES[self.owner]}){lower}"

    def _excuse(self, tier: str) -> str:
        """Returns why the panel of a tier has no curve."""
        some = any(is_evaluated(run) for run in self.comparison.runs if tier in run.tiers)
        return "no finite value" if some else "no evaluated round yet"

    def _plot(self, panel: Axes, method: str, curve: Line, size: float) -> Line2D:
        scaled = replace(curve, spent=[amount / size for amount in curve.spent])
        look = choose_looks(self.comparison.methods)[method]
        width = 1.5 if len(curve.spent) < 200 else 1.0
        return draw_line(panel, scaled, look, label=self._label(method), linewidth=width, markersize=4)

    def _label(self, method: str) -> str:
        # A method without a curve in one panel may lack that tier; without any curve, it is not evaluated yet.
        some = any(map(is_evaluated, self.comparison.by_method[method]))
        return method if some else f"{method} (not evaluated)"


def style_axes(panel: Axes) -> None:
    """Draws a light grid below the curves, and no frame above and right of them."""
    panel.grid(color="0.92", lw=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def draw_line(panel: Axes, curve: Line, look: Look, **how: Any) -> Line2D:
    """Draws a curve, with a band between its lowest and highest seed."""
    colour, dashes, marker = look
    if curve.low != curve.high:
        panel.fill_between(curve.spent, curve.low, curve.high, color=colour, alpha=0.2, lw=0, zorder=1)
    every = max(1, len(curve.spent) // MARKERS_PER_LINE)
    (drawn,) = panel.plot(
        curve.spent, curve.mean, color=colour, linestyle=dashes, marker=marker, markevery=every, **how
    )
    return drawn


def _draw_targets(panel: Axes, metric: MetricInfo, values: Sequence[float]) -> None:
    # The labels are outside the panel, where no curve passes, and do not overlap.
    from_the_top = sorted(values, reverse=True)
    for target in from_the_top:
        panel.axhline(target, color="0.35", ls=(0, (1, 2)), lw=0.8, zorder=0.5)
    bottom, top = panel.get_ylim()
    for place, target in enumerate(from_the_top):
        crowd = sum(other - target < (top - bottom) / 18 for other in from_the_top[:place])
        panel.annotate(
            format_target(metric, target),
            xy=(1, target),
            xycoords=("axes fraction", "data"),
            xytext=(2 + 36 * max(0, crowd - 1), -2 if crowd else 2),
            textcoords="offset points",
            va="top" if crowd else "bottom",
            fontsize=7,
            color="0.25",
        )


def write_figure(figure: Figure, out: Path, name: str, dpi: int = PNG_DPI) -> list[Path]:
    """Writes a figure as PNG and as SVG, and returns both paths."""
    png, svg = out / f"{name}.png", out / f"{name}.svg"
    figure.savefig(png, format="png", dpi=dpi)
    write_text(svg, _render_svg(figure, name))
    return [png, svg]


def _render_svg(figure: Figure, salt: str, text_as_paths: bool = True) -> str:
    """Renders a figure as SVG; the same figure and salt give the same bytes."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "path" if text_as_paths else "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def render_inline_svg(figure: Figure, prefix: str) -> str:
    """Renders a figure as an element of an HTML page, with a prefix that keeps its ids distinct."""
    drawing = _render_svg(figure, prefix, text_as_paths=False)
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', drawing)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", drawing)
