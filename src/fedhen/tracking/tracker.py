"""Logs a run to a tracker. A resumed run continues the tracker's run, and no round is logged twice."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedhen.errors import CheckpointError
from fedhen.fileio import untrusted
from fedhen.fileio.atomic import write_json
from fedhen.fileio.untrusted import PARSE_ERRORS
from fedhen.runs.layout import TRACKING
from fedhen.runs.reader import Run, read_run
from fedhen.runs.records import parse_record
from fedhen.tracking.observers import FINISHED, Observer, RunEnd, RunInfo
from fedhen.tracking.values import RoundValues

PROJECT = "fedhen"
"""The project, or experiment, that trackers put runs into, unless their own environment variables name another."""
ROUNDS_AT_ONCE = 100
"""Rounds that are logged together if a tracker catches up."""
_RUN = re.compile(r"[\w.-]{1,128}", re.ASCII)

Values = Mapping[str, float]


@dataclass(frozen=True)
class Logged:
    """What a tracker has of a run: an entry of tracking.json."""

    run: str
    """The tracker's name for the run."""
    round: int = 0
    """The last round that is logged."""
    finished: bool = False
    """Whether the end of the run is logged too."""

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run) or self.round < 0:
            raise ValueError(f"{self.run[:40]!r} cannot be the name of a run")


class Sink(Protocol):
    """Where a tracker puts values: one for each package."""

    def open(self, run: RunInfo, logged: Logged | None) -> Logged:
        """Opens the run that the tracker has, or another if it has none. Returns what the tracker has of it."""

    def log(self, rounds: Mapping[int, Values]) -> None:
        """Logs the values of rounds by number, in rising order."""

    def close(self, run: RunEnd) -> None:
        """Logs the end of the run and its models, and waits until everything is written."""

    @property
    def place(self) -> str:
        """Where the run can be found, in words, without secrets."""


class Tracker(Observer):
    """Logs a run to a sink, first the rounds that were played before and are not logged yet."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.name, self.sink = name, sink

    def start(self, run: RunInfo) -> None:
        if run.folder is None:
            raise ValueError("trackers need a run folder")
        self.folder, self.values = run.folder, RoundValues()
        self.logged = self.sink.open(run, read_logged(run.folder).get(self.name))
        self._save()
        if run.after:
            self._catch_up(read_run(run.folder), run.after)

    def round(self, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        self._log({record["round"]: self.values.add(record, timing)})

    def end(self, run: RunEnd) -> None:
        self.sink.close(run)
        self.logged = replace(self.logged, finished=run.reason == FINISHED)
        self._save()

    def _catch_up(self, run: Run, last: int) -> None:
        seconds = {timing.round: {"total": timing.total} for timing in run.timing}
        records = run.rounds[:last]
        for first in range(0, len(records), ROUNDS_AT_ONCE):
            some = records[first : first + ROUNDS_AT_ONCE]
            self._log({each.round: self.values.add(each.to_dict(), seconds.get(each.round, {})) for each in some})

    def _log(self, rounds: Mapping[int, Values]) -> None:
        new = {number: values for number, values in rounds.items() if number > self.logged.round}
        if new:
            self.sink.log(new)
            self.logged = replace(self.logged, round=max(new), finished=False)
            self._save()

    def _save(self) -> None:
        everything = {**read_logged(self.folder), self.name: self.logged}
        write_json(self.folder / TRACKING, {name: asdict(logged) for name, logged in everything.items()})


def read_logged(folder: Path) -> dict[str, Logged]:
    """Reads what each tracker has of a run. A file that is damaged is ignored, with a warning."""
    try:
        found = untrusted.read_json(folder / TRACKING) or {}
        return {untrusted.check_text(name): parse_record(Logged, values) for name, values in found.items()}
    except (OSError, *PARSE_ERRORS) as error:
        why = untrusted.describe_error(error)
        warnings.warn(f"{folder / TRACKING} is damaged ({why}): trackers start another run", stacklevel=2)
        return {}


def forget_logged(folder: Path) -> None:
    """Makes trackers start another run, because this one starts again at its first round."""
    try:
        (folder / TRACKING).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error.strerror}") from None


def title(run: RunInfo) -> str:
    """Returns what trackers call a run: the name of its folder."""
    return run.folder.resolve().name if run.folder else run.name


def tags(run: RunInfo) -> dict[str, str]:
    """Returns what runs are searched by."""
    chosen = {"recipe": "recipe", "method": "method", "local": "local.name", "seed": "seed"}
    return {name: str(run.settings[key]) for name, key in chosen.items() if key in run.settings}
