"""TensorBoard: event files in RUN/tensorboard, written with tensorboardX or torch.utils.tensorboard."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhen.runs.layout import MODEL_OWNERS
from fedhen.tracking.observers import RunEnd, RunInfo
from fedhen.tracking.tracker import Logged, Values

FOLDER = "tensorboard"


class TensorBoard:
    """Scalars, and the settings for TensorBoard's page of hyperparameters."""

    def open(self, run: RunInfo, logged: Logged | None) -> Logged:
        assert run.folder is not None
        folder = run.folder / FOLDER
        is_there = any(folder.glob("events.out.tfevents.*"))
        # Rounds that are played again are logged again: a restart at a step makes readers forget the later ones.
        kept = min(logged.round, run.after) if logged and is_there else 0
        self.place, self.events = str(folder), open_events(folder)
        if is_there:
            start = self.events.session(status=self.events.session.START)
            self.events.write(self.events.event(wall_time=time.time(), step=kept + 1, session_log=start))
        if not kept:
            self._log_settings(run)
        self.events.flush()
        return Logged(FOLDER, kept)

    def log(self, rounds: Mapping[int, Values]) -> None:
        for number, values in rounds.items():
            for name, value in values.items():
                self._add(self.events.summaries.scalar(name, value), number)
        self.events.flush()

    def close(self, run: RunEnd) -> None:
        self.events.close()

    def _log_settings(self, run: RunInfo) -> None:
        tiers = run.settings.get("tiers", {})
        scores = {f"{run.metrics[0].name}/{owner}/{tier}": 0.0 for owner in MODEL_OWNERS for tier in tiers}
        plain = {
            key: v if isinstance(v, bool | int | float | str) else json.dumps(v) for key, v in run.settings.items()
        }
        for each in self.events.summaries.hparams(plain, scores):
            self._add(each, 0)

    def _add(self, summary: Any, step: int) -> None:
        self.events.write(self.events.event(wall_time=time.time(), step=step, summary=summary))


@dataclass
class Events:
    """An event file, and what makes the events of the package that writes it."""

    event: Any
    session: Any
    summaries: Any
    write: Callable[[Any], object]
    flush: Callable[[], object]
    close: Callable[[], object]


def open_events(folder: Path) -> Events:
    """Opens a new event file. Both packages write it with a thread by default, which a kill would take by surprise."""
    folder.mkdir(exist_ok=True)
    # Readers sort the files by name, which has only whole seconds.
    suffix = f".{time.time_ns():020}"
    if importlib.util.find_spec("tensorboardX"):
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        direct = EventsWriter(str(folder / "events"), suffix)
        return Events(Event, SessionLog, summary, direct.write_event, direct.flush, direct.close)
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from torch.utils.tensorboard import summary

    threaded = EventFileWriter(str(folder), filename_suffix=suffix)  # whose flush waits for its thread
    return Events(Event, SessionLog, summary, threaded.add_event, threaded.flush, threaded.close)
