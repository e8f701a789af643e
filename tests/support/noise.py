"""Short runs on noise: two exits, ten devices, four rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from fedhen.algorithm.rounds import Devices, Round, Rules, Sent, play_rounds
from fedhen.algorithm.updates import Update
from fedhen.config import validation
from fedhen.config.settings import Config
from fedhen.data.dataset import Data
from fedhen.experiment.build import build_experiment
from fedhen.experiment.experiment import Experiment
from support.families import came_back, two_exits


def data() -> Data:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(120, 6))), torch.from_numpy(rng.integers(0, 3, 120))
    return Data(x[:80], y[:80], x[80:], y[80:], 3)


def config(method: str = "fedhen", **settings: object) -> Config:
    base = {
        "method": method,
        "rounds": 4,
        "devices": {"number": 10, "active": 4},
        "model": {"family": "python"},
        "training": {"epochs": 1, "batch_size": 4},
        "evaluation": {"every": 2},
    }
    return validation.from_mapping({**base, **settings})


def experiment(method: str = "fedhen", **settings: object) -> Experiment:
    return build_experiment(config(method, **settings), data=data(), family=two_exits(), accelerator="cpu")


def one_round(run: Experiment, devices: Devices, active: list[int], rules: Rules) -> Iterator[Round]:
    return play_rounds(run.server, run.memories, devices, replace(rules, activate=lambda number, losses: active), [1])


def first(run: Experiment, number: int, active: list[int]) -> Update:
    """What the first of these devices sends back."""
    return came_back(run.engine.devices.train(number, Sent(run.server, run.memories.mean), active))[0]
