"""Draws the paper's figures for print, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedhen.reports.curves import BAND, choose_looks
from fedhen.reports.figures import STYLE, draw_line, line_style, style_axes, tick_whole_numbers
from fedhen.reports.paper.figures import DASHES, Panel, PaperFigure
from fedhen.reports.paper.selection import format_fraction
from fedhen.reports.paper.values import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.0
"""Inches of a figure with two panels, so that text keeps its size in print."""
PAPER_STYLE: dict[Any, Any] = {**STYLE, "font.size": 7.5, "axes.titlesize": 8}
SMALL_FONT = 6.5
CURVE_LINE: dict[str, Any] = {"linewidth": 1.0, "markersize": 3}
LEGEND: dict[str, Any] = {
    "loc": "lower right",
    "fontsize": SMALL_FONT,
    "title_fontsize": SMALL_FONT,
    "handlelength": 1.7,
}
LEGEND_SPACING: dict[str, Any] = {"handletextpad": 0.5, "labelspacing": 0.25, "borderpad": 0.2, "borderaxespad": 0.2}
TARGET_LINE: dict[str, Any] = {"color": "0.35", "linestyle": (0, (1, 2)), "linewidth": 0.8}


def draw_figure(each: PaperFigure) -> Figure:
    """Draws the panels with shared axes and a common legend."""
    import matplotlib
    from matplotlib.figure import Figure

    rows, across = len(each.rows), len(each.rows[0])
    size = (WIDTH, 2.1 * rows + (0.5 if each.several_seeds else 0.35))
    with matplotlib.rc_context(PAPER_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, across, squeeze=False, sharex=True, sharey=True)
        for row, panels in zip(axes, each.rows, strict=True):
            row[0].set_ylabel("test accuracy, %")
            for axis, panel in zip(row, panels, strict=True):
                _draw(each, axis, panel)
        for axis in axes[-1]:
            axis.set_xlabel("communication round")
        _draw_legend(each, figure)
    return figure


def _draw(each: PaperFigure, axis: Axes, panel: Panel) -> None:
    from matplotlib.ticker import MultipleLocator

    axis.set_title(panel.title)
    axis.set_xlim(0, each.last_round)
    axis.set_ylim(*each.limits)
    tick_whole_numbers(axis)
    axis.yaxis.set_major_locator(MultipleLocator(10))
    for place, method in enumerate(METHODS):
        curve = each.lines[panel.title, method]
        draw_line(axis, curve, choose_looks([method])[method], **CURVE_LINE).set_zorder(10 - place)  # FedHeN on top
    _draw_targets(axis, panel.targets)
    _draw_references(each, axis, panel)
    _note_missing(each, axis, panel)
    style_axes(axis)


def _draw_references(each: PaperFigure, axis: Axes, panel: Panel) -> None:
    # The legend is in the corner that rising curves leave free.
    handles = [
        axis.axhline(
            value,
            color="0.45",
            ls=line_style(DASHES[fraction]),
            lw=0.8,
            zorder=0.6,
            label=f"{format_fraction(fraction)} data {value:.1f} ({whose})",
        )
        for fraction, (value, whose) in each.list_references(panel).items()
    ]
    key = axis.legend(handles=handles, title="Centralised, %", **LEGEND, **LEGEND_SPACING)
    key.set_alignment("left")
    key.get_frame().set(linewidth=0, alpha=0.8)
    key.set_zorder(2)


def _note_missing(each: PaperFigure, axis: Axes, panel: Panel) -> None:
    for height, (words, names) in zip((0.33, 0.43), each.list_missing(panel).items(), strict=True):
        if len(names) == len(METHODS):
            axis.text(0.5, 0.36, words, transform=axis.transAxes, ha="center", color="0.3", fontsize=9)
        elif names:
            text = f"{words}: {', '.join(names)}"
            axis.text(0.98, height, text, transform=axis.transAxes, ha="right", color="0.3", fontsize=SMALL_FONT)


def _draw_legend(each: PaperFigure, figure: Figure) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for method, name in METHODS.items():
        look = choose_looks([method])[method]
        style = {"color": look.colour, "ls": line_style(look.dashes), "marker": look.marker}
        handles.append(Line2D([], [], label=name, **style, **CURVE_LINE))
    handles.append(Line2D([], [], label="target", **TARGET_LINE))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        handlelength=2.6,
        columnspacing=1.2,
        title=BAND if each.several_seeds else None,
        title_fontsize=SMALL_FONT,
    )


def _draw_targets(axis: Axes, percents: Sequence[float]) -> None:
    # The labels are outside the panel, where no curve passes: one above its line, one below.
    for target, side in zip(percents, ("bottom", "top"), strict=True):
        axis.axhline(target, zorder=0.5, **TARGET_LINE)
        axis.annotate(
            f"{target:.1f}",
            xy=(1, target),
            xycoords=("axes fraction", "data"),
            xytext=(2, 0),
            textcoords="offset points",
            va=side,
            fontsize=SMALL_FONT,
            color="0.25",
        )
