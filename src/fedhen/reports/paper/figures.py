"""The paper's Figures 1 to 3: accuracy over rounds, with its targets and the accuracies of centralised training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import mean

from fedhen.reports.costs import ROUNDS
from fedhen.reports.curves import BAND, Line, average_curves, choose_looks
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
from fedhen.reports.plots import Curve, Level, Plot

DASHES: Mapping[float, tuple[float, ...]] = {1.0: (7, 2), 0.5: (3, 2)}
"""Share of the data -> dashes of its centralised line."""


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
    """One of the paper's figures."""

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

    @cached_property
    def plots(self) -> list[list[Plot]]:
        """The plots of a page."""
        return [[self._plot(panel) for panel in row] for row in self.rows]

    def _plot(self, panel: Panel) -> Plot:
        lines = [self.lines[panel.title, method] for method in METHODS]
        references = self.list_references(panel)
        ours = [f"{format_fraction(f)} data {value:.1f} ({whose})" for f, (value, whose) in references.items()]
        missing = [f"{words}: {', '.join(absent)}" for words, absent in self.list_missing(panel).items() if absent]
        return Plot(
            title=panel.title,
            x_label="communication round",
            y_label="test accuracy, %",
            curves=[
                Curve(name, choose_looks([method])[method], line)
                for (method, name), line in zip(METHODS.items(), lines, strict=True)
            ],
            levels=[
                *(Level(target, f"{target:.1f}") for target in panel.targets),
                *(Level(value, f"{value:.1f}", DASHES[fraction]) for fraction, (value, _) in references.items()),
            ],
            whole=True,
            excuse="" if any(line.spent for line in lines) else "no curve yet",
            note=". ".join([f"Centralised, %: {', '.join(ours)}", *missing]),
            x_end=self.last_round,
            y_limits=self.limits,
        )

    @cached_property
    def lines(self) -> dict[tuple[str, str], Line]:
        """(title of the panel, method) -> curve, empty if nothing is evaluated."""
        return {
            (panel.title, method): average_curves(
                self.selection.federated[panel.recipe, method], panel.tier, self.owner, ROUNDS.spent
            )
            for panel in self._panels
            for method in METHODS
        }

    @cached_property
    def limits(self) -> tuple[float, float]:
        """The y axis of all panels: from well below the targets to above the centralised lines."""
        drawn = [each for each in self.lines.values() if each.spent]
        references = [value for panel in self._panels for value, _ in self.list_references(panel).values()]
        low = min([min(panel.targets) - 38 for panel in self._panels] + [max(each.mean) - 10 for each in drawn])
        high = max([*references, *(max(each.high) for each in drawn)])
        return max(0, 5 * math.floor(low / 5)), min(100, 5 * math.ceil((high + 1) / 5))

    @cached_property
    def last_round(self) -> int:
        runs = chain.from_iterable(self.selection.federated[panel.recipe, m] for panel in self._panels for m in METHODS)
        return max((run.settings.rounds for run in runs), default=1000)

    def list_references(self, panel: Panel) -> dict[float, tuple[float, str]]:
        """Share of the data -> the centralised accuracy, and whose it is."""
        found = {}
        for place, printed in CENTRALISED_PERCENT.items():
            if place[:2] == (panel.data, panel.tier):
                ours, _ = reference_percents(self.selection, place)
                found[place[2]] = (mean(ours), "ours") if ours else (printed, "paper")
        return found

    def list_missing(self, panel: Panel) -> dict[str, list[str]]:
        """Returns the methods without a curve, by what they lack."""
        absent: dict[str, list[str]] = {"not run yet": [], "not evaluated yet": []}
        for method, name in METHODS.items():
            if not self.lines[panel.title, method].spent:
                runs = self.selection.federated[panel.recipe, method]
                absent["not evaluated yet" if runs else "not run yet"].append(name)
        return absent


def make_figures(selection: Selection, owner: str) -> list[PaperFigure]:
    return [PaperFigure(number, *each, selection, owner) for number, each in enumerate(LAYOUT.items(), start=1)]
