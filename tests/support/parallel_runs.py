"""Small experiments with a number of workers, and everything that they leave behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fedhen import Family
from fedhen.algorithm.methods import load_method
from fedhen.config import validation
from fedhen.data.dataset import Data
from fedhen.experiment.build import build_experiment
from fedhen.experiment.experiment import Experiment

NUMBERS = [1, 2, 5]
BASE: dict[str, Any] = {
    "rounds": 3,
    "devices": {"number": 8, "active": 5},
    "model": {"family": "python"},
    "training": {"epochs": 2, "batch_size": 5},
    "local": {"name": "plain", "mu": 0.5, "alpha": 0.2},
    "evaluation": {"every": 1},
}


def vectors() -> Data:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(120, 6))), torch.from_numpy(rng.integers(0, 3, 120))
    return Data(x[:96], y[:96], x[96:], y[96:], 3)


def both(build: Callable[[bool], nn.Module], **more: Any) -> Family:
    return Family({"simple": lambda: build(False), "complex": lambda: build(True)}, **more)


def experiment(workers: int, family: Family, data: Data, /, **settings: Any) -> Experiment:
    merged = {k: {**BASE.get(k, {}), **v} if isinstance(v, dict) and k != "tiers" else v for k, v in settings.items()}
    merged["runtime"] = {**merged.get("runtime", {}), "workers": workers}
    config = validation.from_mapping({**BASE, **merged})
    chosen = load_method(config.method)
    config = chosen.keep_tiers(config)
    return build_experiment(config, data=data, family=family, method=chosen, accelerator="cpu")


def everything(run: Experiment) -> tuple[list[str], dict[str, bytes]]:
    """What a run leaves behind: its records as text, and its models and memories as bytes."""
    records = [json.dumps(step.record) for step in run.play()]
    found = {
        f"{kind} {tier} {name}": tensor.contiguous().numpy().tobytes()
        for kind, models in {**run.models(), "mean": run.memories.mean, "moments": run.moments}.items()
        for tier, weights in models.items()
        for name, tensor in weights.items()
    }
    found |= {f"memory {device}": run.memory.vector(device).numpy().tobytes() for device in run.memory}
    return records, found
