"""The paper's Figures 1 to 3: accuracy over rounds, with its targets and the accuracies of centralised training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import mean
from typing import TYPE_CHECKING, Any

from fedhen.reports.costs import ROUNDS
from fedhen.reports.curves import BAND, STYLE, Line, average_curves, choose_looks, draw_line, style_axes
from fedhen.reports.names import OWNER_NAMES
from fedhen.reports.paper.centralised import reference_percents
from fedhen.reports.paper.selection import Selection, format_fraction
from fedhen.reports.paper.values import (
    CENTRALISED_PERCENT,
    DATA_SETS,
    IID,
    METHODS,
    NON_IID,
    ROUNDS_TO_TARGET,
    TIERS,
    Split,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.0
"""Inches of a figure with two panels, so that text keeps its size in print."""
PAPER_STYLE: dict[Any, Any] = {**STYLE, "font.size": 7.5, "axes.titlesize": 8}
SMALL_FONT = 6.5
DASHES: Mapping[float, Any] = {1.0: (0, (7, 2)), 0.5: (0, (3, 2))}
"""Share of the data -> dashes of its centralised line."""
CURVE_LINE: dict[str, Any] = {"linewidth": 1.0, "markersize": 3}
LEGEND: dict[str, Any] = {
    "loc": "lower right",
    "fontsize": SMALL_FONT,
    "title_fontsize": SMALL_FONT,
    "handlelength": 1.7,
}
LEGEND_SPACING: dict[str, Any] = {"handletextpad": 0.5, "labelspacing": 0.25, "borderpad": 0.2, "borderaxespad": 0.2}
TARGET_LINE: dict[str, Any] = {"color": "0.35", "linestyle": (0, (1, 2)), "linewidth": 0.8}


@dataclass(frozen=True)
class Panel:
    """A tier's curves in one experiment."""

    data: str
    split: Split
    tier: str

    @property
    def recipe(self) -> str:
        return self.split.recipes[self.data]

    @property
    def title(self) -> str:
        return f"{DATA_SETS[self.data]} {self.split.name}, {self.tier} model"

    @property
    def targets(self) -> tuple[float, ...]:
        """The paper's targets, highest first."""
        return tuple(row.percent for row in ROUNDS_TO_TARGET[self.recipe][self.tier])


def _make_row(data: str, split: Split) -> tuple[Panel, ...]:
    return tuple(Panel(data, split, tier) for tier in TIERS)


LAYOUT: Mapping[str, tuple[tuple[Panel, ...], ...]] = {
    "CIFAR-10, IID split": (_make_row("cifar10", IID),),
    "CIFAR-10, non-IID split": (_make_row("cifar10", NON_IID),),
    "CIFAR-100, IID split above, non-IID split below": (_make_row("cifar100", IID), _make_row("cifar100", NON_IID)),
}
"""Subject of each figure of the paper -> its rows of panels."""


@dataclass(frozen=True)
class PaperFigure:
    """One of the paper's figures; its panels can also be drawn one by one."""

    number: int
    subject: str
    rows: tuple[tuple[Panel, ...], ...]
    selection: Selection
    owner: str

    @property
    def name(self) -> str:
        """The name of its files, without an ending."""
        return f"figure-{self.number}"

    @property
    def title(self) -> str:
        return f"Figure {self.number}. {self.subject}: test accuracy over rounds"

    @property
    def caption(self) -> str:
        seeds = f" {BAND.capitalize()}." if self.several_seeds else ""
        return (
            f"Test accuracy over communication rounds ({OWNER_NAMES[self.owner]}), {self.subject}; simple model left, "
            f"complex model right.{seeds} Dotted: the paper’s targets. Dashed: the same model trained in one place, on "
            "all of the data and on half of it; our value, or the paper’s where we have not run it."
        )

    @property
    def several_seeds(self) -> bool:
        cells = [self.selection.federated[panel.recipe, method] for panel in self._panels for method in METHODS]
        return any(len(runs) > 1 for runs in cells)

    @property
    def _panels(self) -> list[Panel]:
        return list(chain.from_iterable(self.rows))

    def draw(self, rows: Sequence[Sequence[Panel]]) -> Figure:
        """Draws the given panels with shared axes and a common legend."""
        import matplotlib
        from matplotlib.figure import Figure

        across = len(rows[0])
        size = (WIDTH if across > 1 else 0.7 * WIDTH, 2.1 * len(rows) + (0.5 if self.several_seeds else 0.35))
        with matplotlib.rc_context(PAPER_STYLE):
            figure = Figure(figsize=size, layout="constrained")
            axes = figure.subplots(len(rows), across, squeeze=False, sharex=True, sharey=True)
            for row, panels in zip(axes, rows, strict=True):
                row[0].set_ylabel("test accuracy, %")
                for axis, panel in zip(row, panels, strict=True):
                    self._draw(axis, panel)
            for axis in axes[-1]:
                axis.set_xlabel("communication round")
            self._legend(figure)
        return figure

    @cached_property
    def _lines(self) -> dict[tuple[str, str], Line]:
        """(title of the panel, method) -> curve, empty if nothing is evaluated."""
        return {
            (panel.title, method): average_curves(
                self.selection.federated[panel.recipe, method], panel.tier, self.owner, ROUNDS.spent
            )
            for panel in self._panels
            for method in METHODS
        }

    @cached_property
    def _limits(self) -> tuple[float, float]:
        """The y axis of all panels: from well below the targets to above the centralised lines."""
        drawn = [each for each in self._lines.values() if each.spent]
        references = [value for panel in self._panels for value, _ in self._references(panel).values()]
        low = min([min(panel.targets) - 38 for panel in self._panels] + [max(each.mean) - 10 for each in drawn])
        high = max([*references, *(max(each.high) for each in drawn)])
        return max(0, 5 * math.floor(low / 5)), min(100, 5 * math.ceil((high + 1) / 5))

    @cached_property
    def _rounds(self) -> int:
        runs = chain.from_iterable(self.selection.federated[panel.recipe, m] for panel in self._panels for m in METHODS)
        return max((run.settings.rounds for run in runs), default=1000)

    def _references(self, panel: Panel) -> dict[float, tuple[float, str]]:
        """Share of the data -> the centralised accuracy, and whose it is."""
        found = {}
        for place, printed in CENTRALISED_PERCENT.items():
            if place[:2] == (panel.data, panel.tier):
                ours, _ = reference_percents(self.selection, place)
                found[place[2]] = (mean(ours), "ours") if ours else (printed, "paper")
        return found

    def _draw(self, axis: Axes, panel: Panel) -> None:
        from matplotlib.ticker import MultipleLocator

        axis.set_title(panel.title)
        axis.set_xlim(0, self._rounds)
        axis.set_ylim(*self._limits)
        axis.yaxis.set_major_locator(MultipleLocator(10))
        for place, method in enumerate(METHODS):
            curve = self._lines[panel.title, method]
            draw_line(axis, curve, choose_looks([method])[method], **CURVE_LINE).set_zorder(10 - place)  # FedHeN on top
        _draw_targets(axis, panel.targets)
        self._draw_references(axis, panel)
        self._note_missing(axis, panel)
        style_axes(axis)

    def _draw_references(self, axis: Axes, panel: Panel) -> None:
        # The legend is in the corner that rising curves leave free.
        handles = [
            axis.axhline(
                value,
                color="0.45",
                ls=DASHES[fraction],
                lw=0.8,
                zorder=0.6,
                label=f"{format_fraction(fraction)} data {value:.1f} ({whose})",
            )
            for fraction, (value, whose) in self._references(panel).items()
        ]
        key = axis.legend(handles=handles, title="Centralised, %", **LEGEND, **LEGEND_SPACING)
        key.set_alignment("left")
        key.get_frame().set(linewidth=0, alpha=0.8)
        key.set_zorder(2)

    def _note_missing(self, axis: Axes, panel: Panel) -> None:
        absent: dict[str, list[str]] = {"not run yet": [], "not evaluated yet": []}
        for method, name in METHODS.items():
            if not self._lines[panel.title, method].spent:
                runs = self.selection.federated[panel.recipe, method]
                absent["not evaluated yet" if runs else "not run yet"].append(name)
        for height, (words, names) in zip((0.33, 0.43), absent.items(), strict=True):
            if len(names) == len(METHODS):
                axis.text(0.5, 0.36, words, transform=axis.transAxes, ha="center", color="0.3", fontsize=9)
            elif names:
                text = f"{words}: {', '.join(names)}"
                axis.text(0.98, height, text, transform=axis.transAxes, ha="right", color="0.3", fontsize=SMALL_FONT)

    def _legend(self, figure: Figure) -> None:
        from matplotlib.lines import Line2D

        handles = []
        for method, name in METHODS.items():
            colour, dashes, marker = choose_looks([method])[method]
            handles.append(Line2D([], [], color=colour, ls=dashes, marker=marker, label=name, **CURVE_LINE))
        handles.append(Line2D([], [], label="target", **TARGET_LINE))
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=len(handles),
            frameon=False,
            handlelength=2.6,
            columnspacing=1.2,
            title=BAND if self.several_seeds else None,
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


def make_figures(selection: Selection, owner: str) -> list[PaperFigure]:
    return [PaperFigure(number, *each, selection, owner) for number, each in enumerate(LAYOUT.items(), start=1)]
