"""MLflow: the store that MLFLOW_TRACKING_URI names, or a local SQLite file beside the run folder."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from fedhen.tracking.observers import FINISHED, STOPPED, RunEnd, RunInfo, hide_secrets
from fedhen.tracking.tracker import PROJECT, Logged, Values, tags, title

STORE, ARTIFACTS = "mlflow.db", "mlartifacts"
QUICK_AND_QUIET = {
    # A server that is away must not hold up a run; MLflow would try for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables, set unless the user has set them."""
STATUS = {FINISHED: "FINISHED", STOPPED: "KILLED"}
MOST_METRICS, MOST_PARAMETERS, LONGEST_PARAMETER = 1000, 100, 500
"""Limits of one request."""


class MLflow:
    """Uses MLflow's client, so that a run of the user that is active in this process is left alone."""

    def open(self, run: RunInfo, logged: Logged | None) -> Logged:
        for name, value in QUICK_AND_QUIET.items():
            os.environ.setdefault(name, value)
        import mlflow
        from mlflow.exceptions import MlflowException

        for name in ("mlflow.store.db.utils", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        assert run.folder is not None
        parent = run.folder.resolve().parent
        local = not mlflow.is_tracking_uri_set()  # type: ignore[no-untyped-call]
        address = f"sqlite:///{parent / STORE}" if local else mlflow.get_tracking_uri()
        self.place = hide_secrets(address)
        self.client = mlflow.MlflowClient(tracking_uri=address)
        if logged is not None:
            try:
                self.client.update_run(logged.run, status="RUNNING")
                self.run = logged.run
                return logged
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        self.run = self._create(run, (parent / ARTIFACTS).as_uri() if local else None)
        return Logged(self.run)

    def log(self, rounds: Mapping[int, Values]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        all_ = [Metric(clean(name), v, now, number) for number, values in rounds.items() for name, v in values.items()]
        for first in range(0, len(all_), MOST_METRICS):
            self.client.log_batch(self.run, metrics=all_[first : first + MOST_METRICS])

    def close(self, run: RunEnd) -> None:
        for path in run.models:
            self.client.log_artifact(self.run, str(path), "models")
        self.client.set_terminated(self.run, STATUS.get(run.reason, "FAILED"))

    def _create(self, run: RunInfo, artifacts: str | None) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.client.create_experiment(name, artifacts)
        created: str = self.client.create_run(number, run_name=title(run), tags=tags(run)).info.run_id
        settings = [Param(clean(key), as_text(value)) for key, value in run.settings.items()]
        for first in range(0, len(settings), MOST_PARAMETERS):
            self.client.log_batch(created, params=settings[first : first + MOST_PARAMETERS])
        return created


def clean(name: str) -> str:
    """Returns a name in which characters that MLflow does not take are replaced."""
    return re.sub(r"[^\w\-. /]", "_", name)


def as_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:LONGEST_PARAMETER]
