"""What early exits of the last tier's model give: a table, and a curve over the operations of an example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING

from fedhen.deploy.exit_file import read_exits
from fedhen.deploy.manifest import NEVER, ExitStudy
from fedhen.reports.comparison import Comparison, rounds_done
from fedhen.reports.curves import BAND, Line, choose_looks
from fedhen.reports.names import SEEDS, capitalise
from fedhen.reports.outcome import choose_format
from fedhen.reports.plots import Curve, Plot
from fedhen.reports.rendering import Group, Table
from fedhen.runs.reader import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEANING = (
    "An example leaves at the first exit that is sure enough. Scores of the server’s model, as fedhen evaluate --exits "
    "found them. The threshold is the smallest without loss on one half of the test set, and is scored on the other."
)


@dataclass(frozen=True)
class EarlyExits:
    """The studies of the runs that have one of the model of their last round."""

    comparison: Comparison

    def __bool__(self) -> bool:
        return any(map(self._studies, self.comparison.methods))

    @property
    def title(self) -> str:
        return f"{capitalise(self.comparison.metric.title)} over operations"

    @property
    def caption(self) -> str:
        seeds = f" {BAND.capitalize()}." if self.comparison.several_seeds else ""
        return f"A point for each threshold, on the whole test set: one that is chosen here has seen it.{seeds}"

    @property
    def plots(self) -> tuple[Plot, ...]:
        metric, looks = self.comparison.metric, choose_looks(self.comparison.methods)
        unit = f", {metric.unit}" if metric.unit else ""
        known = filter(self._studies, self.comparison.methods)
        curves = [Curve(method, looks[method], self._line(method)) for method in known]
        plot = Plot(
            title=f"{self.comparison.tiers[-1]} model",
            x_label="operations of an example, % of a pass through the whole model",
            y_label=f"test {metric.title}{unit} (server)",
            curves=curves,
            x_end=100,
        )
        return (plot,)

    def figure(self) -> Figure:
        from fedhen.reports.figures import draw_plots

        return draw_plots(self.plots)

    def values(self) -> Table:
        """Returns every point of the curves as a table."""
        (plot,) = self.plots
        rows = [
            (_threshold(value), *(self._cell(curve.line, place) for curve in plot.curves))
            for place, value in enumerate(self._thresholds())
        ]
        names = (curve.name for curve in plot.curves)
        return Table(
            "exit-values", "Values of the curves", ("Threshold", *names), (Group(plot.title, tuple(rows)),), ""
        )

    def table(self) -> Table:
        """Makes a table of the scores of every exit, and of the threshold that loses nothing."""
        by_method = list(map(self._studies, self.comparison.methods))
        rows = (
            Group(title, tuple((label, *(show(each) if each else "–" for each in by_method)) for label, show in rows))
            for title, rows in (("exits", self._exit_rows()), ("cascade", self._cascade_rows()))
        )
        return Table(
            name="exits",
            title=f"Early exits of the {self.comparison.tiers[-1]} model",
            columns=("Measure", *map(self.comparison.heading, self.comparison.methods)),
            groups=tuple(rows),
            meaning=MEANING,
            notes=(f"{SEEDS}.",) if self.comparison.several_seeds else (),
        )

    def _exit_rows(self) -> Iterator[tuple[str, Callable[[Sequence[ExitStudy]], str]]]:
        names = dict.fromkeys(
            name for m in self.comparison.methods for study in self._studies(m) for name in study.score
        )
        for name in names:
            yield f"{name} exit{self._unit}", partial(self._show_score, name)
        yield (
            "right at the first exit and wrong at the last, %",
            lambda studies: _percent([s.overthinking for s in studies]),
        )

    def _show_score(self, name: str, studies: Sequence[ExitStudy]) -> str:
        return self._format(study.score.get(name) for study in studies)

    def _cascade_rows(self) -> Iterator[tuple[str, Callable[[Sequence[ExitStudy]], str]]]:
        yield "threshold", lambda s: ", ".join(dict.fromkeys(_threshold(each.chosen) for each in s if each.held_out))
        yield (
            f"on the other half{self._unit}",
            lambda studies: self._format(s.held_out.score if s.held_out else None for s in studies),
        )
        yield (
            f"last exit, on the other half{self._unit}",
            lambda studies: self._format(s.last_on_held_out for s in studies),
        )
        yield (
            "operations there, %",
            lambda studies: _percent([s.held_out.operations if s.held_out else None for s in studies]),
        )

    @property
    def _unit(self) -> str:
        unit = self.comparison.metric.unit
        return f", {unit}" if unit else ""

    def _format(self, values: Iterator[float | None]) -> str:
        metric = self.comparison.metric
        found = [metric.scale(value) for value in values if value is not None]
        return choose_format(metric, found)(found) if found else "–"

    def _studies(self, method: str) -> list[ExitStudy]:
        return [study for run in self.comparison.by_method[method] if (study := find_study(run))]

    def _thresholds(self) -> list[float]:
        studies = [study for method in self.comparison.methods for study in self._studies(method)]
        return [row.threshold for row in studies[0].table]

    def _line(self, method: str) -> Line:
        metric, columns = self.comparison.metric, zip(*(s.table for s in self._studies(method)), strict=False)
        points = [
            (
                place,
                mean(100 * row.operations for row in rows),
                [metric.scale(r.score) for r in rows if r.score is not None],
            )
            for place, rows in enumerate(columns)
        ]
        points = [point for point in points if point[2]]
        return Line(
            rounds=[place for place, _, _ in points],
            spent=[spent for _, spent, _ in points],
            mean=[mean(scores) for _, _, scores in points],
            low=[min(scores) for _, _, scores in points],
            high=[max(scores) for _, _, scores in points],
        )

    def _cell(self, line: Line, place: int) -> str:
        if place not in line.rounds:
            return "–"
        at = line.rounds.index(place)
        show = choose_format(self.comparison.metric, line.mean[at : at + 1])
        return f"{show(line.mean[at : at + 1])}, {line.spent[at]:.0f} %"


def find_study(run: Run) -> ExitStudy | None:
    """Returns the study of a run's exits, unless it is of another round than the run's last."""
    found = read_exits(run.folder)
    return found.study if found and found.round in (0, rounds_done(run)) else None


def _percent(values: Sequence[float | None]) -> str:
    found = [100 * value for value in values if value is not None]
    return f"{mean(found):.1f}" if found else "–"


def _threshold(value: float) -> str:
    return "never" if value >= NEVER else f"{value:g}"
