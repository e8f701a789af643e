"""Weights & Biases: offline in RUN/wandb, unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fedhen.tracking.observers import FINISHED, RunEnd, RunInfo
from fedhen.tracking.tracker import PROJECT, Logged, Values, tags, title

START_SECONDS, END_SECONDS = 30, 120
"""That wandb may take to reach its server, and to send the rest at the end; what is not sent stays in the folder."""


class Wandb:
    """Logs nothing but what every tracker gets: neither output, nor code, nor the machine and its user."""

    def open(self, run: RunInfo, logged: Logged | None) -> Logged:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        about, mode = tags(run), os.environ.get("WANDB_MODE", "offline")
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            init_timeout=START_SECONDS,
            login_timeout=START_SECONDS,
            finish_timeout=END_SECONDS,
            finish_timeout_raises=True,
        )
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=logged.run if logged else None,
            resume="allow" if logged else None,
            name=title(run),
            group=about.pop("recipe", None),
            tags=[f"{name} {value}" for name, value in about.items()],
            config=dict(run.settings),
            dir=os.environ.get("WANDB_DIR") or run.folder,
            mode=mode,  # type: ignore[arg-type] # wandb checks it
            reinit="create_new",
            settings=settings,
        )
        self.artifact, self.place = (
            wandb.Artifact(f"models-{self.run.id}", type="model"),
            f"{run.folder}/wandb ({mode})",
        )
        return logged or Logged(self.run.id)

    def log(self, rounds: Mapping[int, Values]) -> None:
        for number, values in rounds.items():
            self.run.log(dict(values), step=number)

    def close(self, run: RunEnd) -> None:
        for path in run.models:
            self.artifact.add_file(str(path), policy="immutable", skip_cache=True)
        if run.models:
            self.run.log_artifact(self.artifact)
        self.run.finish(exit_code=int(run.reason != FINISHED))
