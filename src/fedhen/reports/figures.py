"""Plots as files: drawn by matplotlib, which is imported only here, and written as PNG and SVG."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhen.fileio.atomic import write_text
from fedhen.reports.curves import MARKERS_PER_LINE, Line, Look
from fedhen.reports.plots import Level, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.facecolor": "white",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.constrained_layout.w_pad": 0.08,
    "text.parse_math": False,  # a dollar sign in a name does not start a formula
}
PNG_DPI = 150
PLOTS_PER_ROW = 4
LETTER = 0.085
"""Inches that a character of a legend needs at most, on average."""
HANDLE = 0.8
"""Inches of a legend's entry beside its text."""
LETTERS_OF_A_PLOT = 44
"""Characters of a title or of an axis that fit a plot."""


def draw_plots(plots: Sequence[Plot], legend_title: str = "") -> Figure:
    """Draws plots side by side, with a common legend below, whose entries are wrapped if they are long."""
    import matplotlib
    from matplotlib.figure import Figure

    across, rows = min(len(plots), PLOTS_PER_ROW), -(-len(plots) // PLOTS_PER_ROW)
    width = 0.5 + 3.7 * across
    names = [textwrap.fill(curve.name, int((width - HANDLE) / LETTER)) for curve in plots[0].curves]
    entry = HANDLE + LETTER * max(len(line) for name in names for line in name.splitlines())
    columns = max(1, min(len(names), int(width / entry)))
    lines = -(-len(names) // columns) * max(name.count("\n") + 1 for name in names)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, 3.2 * rows + 0.2 * lines), layout="constrained")
        panels = list(figure.subplots(rows, across, squeeze=False).flat)
        handles = [_draw(panel, plot) for panel, plot in zip(panels, plots, strict=False)]
        for panel in panels[len(plots) :]:
            panel.set_visible(False)
        figure.legend(
            handles[0],
            names,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            handlelength=3,
            title=legend_title or None,
            title_fontsize=8,
        )
    return figure


def _draw(panel: Axes, plot: Plot) -> list[Line2D]:
    """Draws a plot and returns its curves."""
    drawn = []
    for place, curve in enumerate(plot.curves):
        width = 1.5 if len(curve.line.spent) < 200 else 1.0
        drawn.append(draw_line(panel, curve.line, curve.look, linewidth=width, markersize=4))
        drawn[-1].set_zorder(10 - place)  # the hero on top
    if plot.excuse:
        panel.text(0.5, 0.5, plot.excuse, transform=panel.transAxes, ha="center", color="0.4")
    else:
        panel.set_xlim(left=0)
        if plot.y_limits:
            panel.set_ylim(plot.y_limits)
    if plot.whole:
        tick_whole_numbers(panel)
    _draw_levels(panel, plot.levels)
    panel.set_title(textwrap.fill(plot.title, LETTERS_OF_A_PLOT), fontsize=10)
    panel.set_xlabel(plot.x_label)
    parts = plot.y_label.split("; ")
    panel.set_ylabel("\n".join(textwrap.fill(part, LETTERS_OF_A_PLOT) for part in parts), fontsize=8)
    style_axes(panel)
    return drawn


def style_axes(panel: Axes) -> None:
    """Draws a light grid below the curves, and no frame above and right of them."""
    panel.grid(color="0.92", lw=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def tick_whole_numbers(panel: Axes) -> None:
    """Puts the ticks of the horizontal axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))


def line_style(dashes: tuple[float, ...]) -> Any:
    """Returns dashes as matplotlib names them."""
    return (0, dashes) if dashes else "-"


def draw_line(panel: Axes, curve: Line, look: Look, **how: Any) -> Line2D:
    """Draws a curve, with a band between its lowest and highest seed."""
    if curve.low != curve.high:
        panel.fill_between(curve.spent, curve.low, curve.high, color=look.colour, alpha=0.2, lw=0, zorder=1)
    (drawn,) = panel.plot(
        curve.spent,
        curve.mean,
        color=look.colour,
        linestyle=line_style(look.dashes),
        marker=look.marker,
        markevery=max(1, len(curve.spent) // MARKERS_PER_LINE),
        **how,
    )
    return drawn


def _draw_levels(panel: Axes, levels: Sequence[Level]) -> None:
    # The labels are outside the plot, where no curve passes, and do not overlap.
    from_the_top = sorted(levels, key=lambda level: -level.value)
    for level in from_the_top:
        panel.axhline(level.value, color="0.35", ls=line_style(level.dashes), lw=0.8, zorder=0.5)
    bottom, top = panel.get_ylim()
    for place, level in enumerate(from_the_top):
        crowd = sum(other.value - level.value < (top - bottom) / 18 for other in from_the_top[:place])
        panel.annotate(
            level.label,
            xy=(1, level.value),
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


def _render_svg(figure: Figure, salt: str) -> str:
    """Renders a figure as SVG; the same figure and salt give the same bytes."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()
