"""Shows the progress of runs: a live bar for each run on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from fedhen.runs.layout import reported_owner

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


def make_display(rounds: Mapping[str, int], quiet: bool = False) -> Display:
    """Returns a display for runs by name and number of rounds: bars on a terminal, else lines, or nothing if quiet."""
    if quiet:
        return Silent()
    return Bars(rounds) if sys.stderr.isatty() else Lines(rounds)


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

    def __init__(self, rounds: Mapping[str, int]) -> None:
        self.paces = {name: Pace(number) for name, number in rounds.items()}
        self.width = max(map(len, rounds))
        self.last_shown = -SECONDS_BETWEEN_LINES

    def show(self, name: str, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        pace = self.paces[name]
        pace.add(record, timing)
        ends = record["round"] in (1, pace.rounds)
        if ends or time.monotonic() - self.last_shown >= SECONDS_BETWEEN_LINES:
            self.last_shown = time.monotonic()
            parts = [f"round {record['round']}/{pace.rounds}", pace.accuracies, pace.speed, pace.remaining]
            place = (
                f"[{list(self.paces).index(name) + 1}/{len(self.paces)}] "
                if len(self.paces) > MAX_RUNS_WITHOUT_TOTAL
                else ""
            )
            line = f"{place}{name:{self.width}}  " + "  ".join(part for part in parts if part)
            print(line, file=sys.stderr, flush=True)


class Bars:
    """A live bar for each run."""

    def __init__(self, rounds: Mapping[str, int]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        fields = [TextColumn(f"{{task.fields[{field}]}}") for field in ("accuracies", "speed", "left")]
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=10), MofNCompleteColumn(), *fields]
        self.progress = Progress(*columns, console=Console(stderr=True))
        self.paces = {name: Pace(number) for name, number in rounds.items()}
        self.tasks = {
            name: self.progress.add_task(name, total=number, accuracies="waiting", speed="", left="")
            for name, number in rounds.items()
        }
        self.total = Pace(sum(rounds.values()))
        if len(rounds) > MAX_RUNS_WITHOUT_TOTAL:
            self.tasks[""] = self.progress.add_task("all", total=self.total.rounds, accuracies="", speed="", left="")

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
            accuracies=pace.accuracies,
            speed=pace.speed,
            left=pace.remaining,
        )
        if "" in self.tasks:
            self.total.add({**record, "round": self.total.played + 1}, timing)
            self.progress.update(self.tasks[""], completed=self.total.played, left=self.total.remaining)


class Pace:
    """The latest accuracies of a run, its speed and its remaining time."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.played, self.done, self.seconds, self.dropped, self.failed = 0, 0, 0.0, 0, 0
        self.scores: Mapping[str, float] = {}

    def add(self, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        self.done, self.played = record["round"], self.played + 1
        self.seconds += timing["total"]
        self.dropped += len(record["dropped"])
        self.failed += len(record.get("failed", ()))
        if "accuracy" in record:
            self.scores = record["accuracy"][reported_owner(record["accuracy"])]

    @property
    def accuracies(self) -> str:
        """The accuracy of each tier, and the number of dropped and failed devices, if any."""
        parts = [f"{tier} {100 * score:.1f} %" for tier, score in self.scores.items()]
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
