"""Shows the progress of runs: a live bar for each on a terminal, a table in a notebook, plain lines elsewhere."""

from __future__ import annotations

import html
import importlib.util
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from fedhen.runs.layout import reported_owner
from fedhen.runs.records import ACCURACY, MetricInfo, Values
from fedhen.tracking.observers import Observer, RunInfo

SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_UPDATES = 10.0, 0.5
"""Of plain lines, and of a table in a notebook."""
MAX_RUNS_WITHOUT_TOTAL = 3
"""With more runs than this, a display also shows the progress of all runs together."""


class Display(Observer):
    """Shows the progress of runs that are played one after the other. This one shows nothing."""

    name = ""
    """The run that is being played."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def start(self, run: RunInfo) -> None:
        self.name = run.name


def make_display(
    rounds: Mapping[str, int], metric: MetricInfo = ACCURACY, quiet: bool = False, lines: bool = True
) -> Display:
    """Returns a display for runs by name and number of rounds, with the latest values of `metric`.

    It has bars on a terminal and a table in a notebook. Elsewhere it prints lines, or nothing without `lines`.
    """
    if quiet:
        return Display()
    if is_notebook():
        return Table(rounds, metric)
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        return Bars(rounds, metric)
    return Lines(rounds, metric) if lines or sys.stderr.isatty() else Display()


def is_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook. IPython in a terminal has no kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Lines(Display):
    """Plain lines: the first round, the last, and every ten seconds between."""

    def __init__(self, rounds: Mapping[str, int], metric: MetricInfo = ACCURACY) -> None:
        self.paces = {name: Pace(number, metric) for name, number in rounds.items()}
        self.width = max(map(len, rounds), default=0)
        self.last_shown = -SECONDS_BETWEEN_LINES

    def round(self, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        pace = self.paces[self.name]
        pace.add(record, timing)
        ends = record["round"] in (1, pace.rounds)
        if ends or time.monotonic() - self.last_shown >= SECONDS_BETWEEN_LINES:
            self.last_shown = time.monotonic()
            parts = [f"round {record['round']}/{pace.rounds}", pace.scores, pace.speed, pace.remaining]
            place = (
                f"[{list(self.paces).index(self.name) + 1}/{len(self.paces)}] "
                if len(self.paces) > MAX_RUNS_WITHOUT_TOTAL
                else ""
            )
            line = f"{place}{self.name:{self.width}}  " + "  ".join(part for part in parts if part)
            print(line, file=sys.stderr, flush=True)


class Bars(Display):
    """A live bar for each run."""

    def __init__(self, rounds: Mapping[str, int], metric: MetricInfo = ACCURACY) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        fields = [TextColumn(f"{{task.fields[{field}]}}") for field in ("scores", "speed", "left")]
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=10), MofNCompleteColumn(), *fields]
        self.progress = Progress(*columns, console=Console(stderr=True))
        self.paces = {name: Pace(number, metric) for name, number in rounds.items()}
        self.tasks = {
            name: self.progress.add_task(name, total=number, scores="waiting", speed="", left="")
            for name, number in rounds.items()
        }
        self.total = Pace(sum(rounds.values()), metric)
        if len(rounds) > MAX_RUNS_WITHOUT_TOTAL:
            self.tasks[""] = self.progress.add_task("all", total=self.total.rounds, scores="", speed="", left="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def start(self, run: RunInfo) -> None:
        super().start(run)
        self.progress.update(self.tasks[self.name], completed=run.after)

    def round(self, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        pace = self.paces[self.name]
        pace.add(record, timing)
        self.progress.update(
            self.tasks[self.name],
            completed=record["round"],
            scores=pace.scores,
            speed=pace.speed,
            left=pace.remaining,
        )
        if "" in self.tasks:
            self.total.add({**record, "round": self.total.played + 1}, timing)
            self.progress.update(self.tasks[""], completed=self.total.played, left=self.total.remaining)


class Table(Display):
    """A table in a notebook, which is shown once and then updated."""

    def __init__(self, rounds: Mapping[str, int], metric: MetricInfo = ACCURACY) -> None:
        self.paces = {name: Pace(number, metric) for name, number in rounds.items()}
        self.last_shown = time.monotonic()

    def __enter__(self) -> Self:
        from IPython.display import display

        self.handle = display(self, display_id=True)  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.handle.update(self)

    def start(self, run: RunInfo) -> None:
        super().start(run)
        self.paces[self.name].done = run.after

    def round(self, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        self.paces[self.name].add(record, timing)
        if time.monotonic() - self.last_shown >= SECONDS_BETWEEN_UPDATES:
            self.last_shown = time.monotonic()
            self.handle.update(self)

    def __repr__(self) -> str:
        return "\n".join("  ".join(part for part in row if part) for row in self._rows())

    def _repr_html_(self) -> str:
        bars = [f'<progress value="{pace.done}" max="{pace.rounds}"></progress>' for pace in self.paces.values()]
        rows = [[html.escape(cell) for cell in row] for row in self._rows()]
        cells = ["</td><td>".join([name, bar, *rest]) for (name, *rest), bar in zip(rows, bars, strict=True)]
        return f"<table>{''.join(f'<tr><td>{row}</td></tr>' for row in cells)}</table>"

    def _rows(self) -> list[list[str]]:
        return [
            [name, f"round {pace.done}/{pace.rounds}", pace.scores, pace.speed, pace.remaining]
            for name, pace in self.paces.items()
        ]


class Pace:
    """The latest values of a run's primary metric, its speed and its remaining time."""

    def __init__(self, rounds: int, metric: MetricInfo = ACCURACY) -> None:
        self.rounds, self.metric = rounds, metric
        self.played, self.done, self.seconds, self.dropped, self.failed = 0, 0, 0.0, 0, 0
        self.values: Mapping[str, float | None] = {}
        self.epsilon: float | None = None

    def add(self, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        self.done, self.played = record["round"], self.played + 1
        self.seconds += timing["total"]
        self.dropped += len(record["dropped"])
        self.failed += len(record.get("failed", ()))
        self.epsilon = record.get("epsilon")
        if found := self._find_values(record):
            self.values = found[reported_owner(found)]

    def _find_values(self, record: Mapping[str, Any]) -> Values:
        named: dict[str, Values] = {ACCURACY.name: record.get("accuracy", {}), **record.get("metrics", {})}
        scored = {name: values for name, values in named.items() if values}
        if scored and self.metric.name not in scored:
            # The app of a fleet may have a task that its configuration does not name. Then the unit is not known.
            name = next(iter(scored))
            self.metric = ACCURACY if name == ACCURACY.name else MetricInfo(name)
        return scored.get(self.metric.name, {})

    @property
    def scores(self) -> str:
        """The metric's value for each tier, ε, and the number of dropped and failed devices, if there are any."""
        parts = [f"{tier} {self.metric.format(value)}" for tier, value in self.values.items()]
        parts += [f"ε {self.epsilon:.3g}"] if self.epsilon is not None else []
        parts += [f"{self.dropped} dropped"] * bool(self.dropped) + [f"{self.failed} failed"] * bool(self.failed)
        return "  ".join(parts)

    @property
    def speed(self) -> str:
        return f"{self.seconds / self.played:.2f} s a round" if self.played else ""

    @property
    def remaining(self) -> str:
        """The remaining time, or the total time once the run is done."""
        if not self.played:
            return "waiting"
        if self.done == self.rounds:
            return f"took {_duration(self.seconds)}"
        return f"{_duration(self.seconds / self.played * (self.rounds - self.done))} left"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{whole} s"
