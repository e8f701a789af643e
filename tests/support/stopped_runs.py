"""Small runs in this process whose models are captured in every round, and that can be stopped after any of them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

import fedhen
from fedhen.config import validation
from fedhen.config.data_settings import OWN
from fedhen.experiment.build import build_experiment
from fedhen.experiment.experiment import Step
from fedhen.experiment.resume import NEW_RUN, ResumePolicy
from fedhen.experiment.runner import play_run
from fedhen.params import TierModels
from support.families import TwoExits

SETTINGS: dict[str, Any] = {
    "rounds": 8,
    "devices": {"number": 8, "active": 2},
    "data": {"name": OWN},
    "model": {"family": OWN},
    "training": {"lr": 0.3, "batch_size": 5, "epochs": 2},
    "evaluation": {"every": 1},
    "checkpoint": {"rounds": 1},
    "runtime": {"engine": "plain"},
}
"""Two of eight devices are active, so that some have not trained for many rounds."""


def frozen_body() -> fedhen.Family:
    """The family of two exits, whose first layer no device trains."""

    def build(deep: bool) -> nn.Module:
        module = TwoExits(6, 3, deep)
        module.body.requires_grad_(False)
        return module

    return fedhen.Family({"simple": lambda: build(False), "complex": lambda: build(True)})


def clusters(seed: int = 0) -> fedhen.Data:
    """Three overlapping clouds of points: the accuracy rises and falls."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, 240)
    x = rng.normal(size=(240, 6)) + 1.2 * np.eye(6)[y]
    return fedhen.arrays(x[:160], y[:160], x[160:], y[160:], classes=3)


@dataclass
class PlayedRun:
    """A run in its folder, and what was captured while it was played."""

    folder: Path
    models: dict[int, dict[str, TierModels]] = field(default_factory=dict)
    """Round -> owner -> tier -> all weights, copied when the round was over."""
    records: list[dict[str, Any]] = field(default_factory=list)

    def steps(self, how: ResumePolicy = NEW_RUN, **changes: Any) -> Iterator[Step]:
        config = validation.from_mapping(changes, validation.from_mapping(SETTINGS))
        experiment = build_experiment(config, data=clusters(), family=frozen_body(), accelerator="cpu")
        for step in play_run(self.folder, experiment, how):
            fixed = experiment.population.fixed
            self.models[step.record["round"]] = {
                owner: {t: {n: x.clone() for n, x in {**w, **fixed[t]}.items()} for t, w in tiers.items()}
                for owner, tiers in experiment.models().items()
            }
            self.records.append(step.record)
            yield step

    def play(self, how: ResumePolicy = NEW_RUN, stop_after: int = 0, **changes: Any) -> PlayedRun:
        """Plays to the end, or until a round is over and saved."""
        self.folder.mkdir(exist_ok=True)
        # Closing the generator is what an exception in a user's loop does: the run is not finished.
        with closing(self.steps(how, **changes)) as steps:  # type: ignore[type-var]
            for step in steps:
                if step.record["round"] == stop_after:
                    break
        return self

    def accuracy(self, owner: str, tier: str) -> list[float]:
        """The accuracy in each round."""
        return [record["accuracy"][owner][tier] for record in self.records]

    def copy(self, folder: Path) -> PlayedRun:
        return PlayedRun(shutil.copytree(self.folder, folder), dict(self.models), list(self.records))


def wait_for_writer() -> None:
    """Waits until the checkpoint that is being written is complete."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


def same_weights(module: nn.Module, weights: dict[str, Tensor]) -> bool:
    found = module.state_dict()
    return found.keys() == weights.keys() and all(bool((found[name] == weights[name]).all()) for name in weights)
