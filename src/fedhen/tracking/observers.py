"""The seam between a run and those who watch it: the display, users' callbacks and trackers are observers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedhen.errors import one_line
from fedhen.fileio import untrusted
from fedhen.runs.layout import MODELS, SUMMARY
from fedhen.runs.records import ACCURACY, MetricInfo

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
"""Reasons why a run ends."""


@dataclass(frozen=True)
class RunInfo:
    """What observers are told about a run when it starts."""

    name: str
    rounds: int
    """The number of the last round that is planned."""
    after: int = 0
    """The round that the run is resumed after; 0 if it starts at its first round."""
    folder: Path | None = None
    """The run folder, or None if nothing is written."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Every setting by its full key, like `training.lr`."""
    metrics: tuple[MetricInfo, ...] = (ACCURACY,)
    """The metrics that are recorded, the primary one first."""


@dataclass(frozen=True)
class RunEnd:
    """What observers are told about a run when it ends."""

    reason: str = FINISHED
    """"finished", "stopped" or "failed"."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """What is in `summary.json`; empty unless the run is finished and has a folder."""
    models: tuple[Path, ...] = ()
    """The files of its models; none unless the run is finished and has a folder."""
    error: BaseException | None = None
    """The error that has ended it, if any."""


def read_end(folder: Path, reason: str, error: BaseException | None = None) -> RunEnd:
    """Reads how a run has ended from its folder. A run that has a summary is finished, unless it has failed."""
    found = untrusted.read_json(folder / SUMMARY)
    if found is None:
        return RunEnd(reason, error=error)
    models = sorted((folder / MODELS).glob("*.safetensors"))
    return RunEnd(reason if error else FINISHED, found, tuple(models), error)


class Observer:
    """Watches a run. Only rank 0 has observers.

    Override what you need:

        class Bell(fedhen.Observer):
            def end(self, run):
                print("\\a", run.reason)

        fedhen.train(family, data, track=[Bell()])
    """

    def start(self, run: RunInfo) -> None:
        """Is called before the first round that is played."""

    def round(self, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        """Is called after each round, with its record as in `rounds.jsonl` and its seconds as in `timing.jsonl`."""

    def end(self, run: RunEnd) -> None:
        """Is called after the last round, also if the run was stopped or has failed."""


Callback = Callable[[dict[str, Any]], object]


@dataclass
class CallbackObserver(Observer):
    """Calls a function with each round's record."""

    call: Callback

    def round(self, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        # A copy, so that a callback cannot change what the run has recorded.
        self.call(copy.deepcopy(dict(record)))


def describe(error: BaseException) -> str:
    """Returns an error in one line of at most 300 characters, without secrets."""
    return hide_secrets(one_line(f"{type(error).__name__}: {error}"))[:300]


def hide_secrets(text: str) -> str:
    """Returns a text without the names, passwords and tokens in its addresses."""
    text = re.sub(r"://[^/\s]*@", "://", text)
    return re.sub(r"(?i)((?:token|key|secret|password)=)[^&\s'\"]+", r"\1...", text)
