"""Trackio: its local store, unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names another."""

from __future__ import annotations

import contextlib
import io
import os
import uuid
from collections.abc import Mapping

from fedhen.tracking.observers import RunEnd, RunInfo
from fedhen.tracking.tracker import PROJECT, Logged, Values, tags, title


class Trackio:
    """Trackio finds a run by its name, so a name gets a few characters that no other run has."""

    def open(self, run: RunInfo, logged: Logged | None) -> Logged:
        import trackio

        name, about = logged.run if logged else f"{title(run)}-{uuid.uuid4().hex[:6]}", tags(run)
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        with quiet():
            self.run = trackio.init(
                project=project,
                name=name,
                group=about.get("recipe"),
                config={**run.settings, "tags": about},
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self.place = f"project {project}, run {name}"
        return logged or Logged(name)

    def log(self, rounds: Mapping[int, Values]) -> None:
        for number, values in rounds.items():
            self.run.log(dict(values), step=number)

    def close(self, run: RunEnd) -> None:
        with quiet():
            for path in run.models:
                self.run.log_artifact(str(path), name=f"{self.run.name}-{path.stem}", type="model")
            self.run.finish()


def quiet() -> contextlib.AbstractContextManager[object]:
    """Discards what Trackio prints, since the output of a command is its result."""
    return contextlib.redirect_stdout(io.StringIO())
