"""Shows the progress of runs: a live bar for each run on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from fedhen.runs.layout import reported_owner
from fedhen.runs.records import ACCURACY, MetricInfo, Values

SECONDS_BETWEEN_LINES = 10.0
MAX_RUNS_WITHOUT_TOTAL = 3
"""With more runs than this, a display also shows the progress of all runs together."""


class Display(Protocol):
    """Shows the progress of runs."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, name: str, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        """Shows that another round of the named run is done."""


def make_display(rounds: Mapping[str, int], metric: MetricInfo = ACCURACY, quiet: bool = False) -> Display:
    """Returns a display for runs by name and number of rounds: bars on a terminal, else lines, or nothing if quiet.

    It shows the latest values of `metric`.
    """
    if quiet:
        return Silent()
    return Bars(rounds, metric) if sys.stderr.isatty() else Lines(rounds, metric)


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, name: str, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        pass


class Lines(Silent):
    """Plain lines: the first round, the last, and every ten seconds between."""

    def __init__(self, rounds: Mapping[str, int], metric: MetricInfo = ACCURACY) -> None:
        self.paces = {name: Pace(number, metric) for name, number in rounds.items()}
        self.width = max(map(len, rounds), default=0)
        self.last_shown = -SECONDS_BETWEEN_LINES

    def show(self, name: str, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        pace = self.paces[name]
        pace.add(record, timing)
        ends = record["round"] in (1, pace.rounds)
        if ends or time.monotonic() - self.last_shown >= SECONDS_BETWEEN_LINES:
            self.last_shown = time.monotonic()
            parts = [f"round {record['round']}/{pace.rounds}", pace.scores, pace.speed, pace.remaining]
            place = (
                f"[{list(self.paces).index(name) + 1}/{len(self.paces)}] "
                if len(self.paces) > MAX_RUNS_WITHOUT_TOTAL
                else ""
            )
            line = f"{place}{name:{self.width}}  " + "  ".join(part for part in parts if part)
            print(line, file=sys.stderr, flush=True)


class Bars:
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

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def show(self, name: str, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        pace = self.paces[name]
        pace.add(record, timing)
        self.progress.update(
            self.tasks[name],
            completed=record["round"],
            scores=pace.scores,
            speed=pace.speed,
            left=pace.remaining,
        )
        if "" in self.tasks:
            self.total.add({**record, "round": self.total.played + 1}, timing)
            self.progress.update(self.tasks[""], completed=self.total.played, left=self.total.remaining)


class Pace:
    """The latest values of a run's primary metric, its speed and its remaining time."""

    def __init__(self, rounds: int, metric: MetricInfo = ACCURACY) -> None:
        self.rounds, self.metric = rounds, metric
        self.played, self.done, self.seconds, self.dropped, self.failed = 0, 0, 0.0, 0, 0
        self.values: Mapping[str, float | None] = {}

    def add(self, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        self.done, self.played = record["round"], self.played + 1
        self.seconds += timing["total"]
        self.dropped += len(record["dropped"])
        self.failed += len(record.get("failed", ()))
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
        """The metric's value for each tier, and the number of dropped and failed devices, if any."""
        parts = [f"{tier} {self.metric.format(value)}" for tier, value in self.values.items()]
        parts += [f"{self.dropped} dropped"] * bool(self.dropped) + [f"{self.failed} failed"] * bool(self.failed)
        return "  ".join(parts)

    @property
    def speed(self) -> str:
        return f"{self.seconds / self.played:.2f} s a round"

    @property
    def remaining(self) -> str:
        """The remaining time, or the total time once the run is done."""
        if self.done == self.rounds:
            return f"took {_duration(self.seconds)}"
        return f"{_duration(self.seconds / self.played * (self.rounds - self.done))} left"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{whole} s"
