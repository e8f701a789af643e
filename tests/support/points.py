"""A small family and small data from Python, whose training takes milliseconds a round."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedhen
from support.families import two_exits

SMALL: dict[str, Any] = {
    "rounds": 3,
    "accelerator": "cpu",
    "devices": {"number": 4, "active": 2},
    "training": {"epochs": 1, "batch_size": 8},
    "evaluation": {"every": 2},
    "runtime": {"workers": 1},
}
TINY: dict[str, Any] = {
    "rounds": 2,
    "accelerator": "cpu",
    "data": {"limit": 80},
    "devices": {"number": 4, "active": 2},
    "training": {"epochs": 1},
    "model": {"widths": [4, 4, 8, 8]},
    "runtime": {"workers": 1},
}
"""The settings of `support.tiny` as keyword arguments."""


def family() -> fedhen.Family:
    return two_exits()


def points(tests: int = 30) -> fedhen.FederatedData:
    """Returns three clouds of points in six dimensions, with this number of test examples."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60 + tests)
    x = np.eye(6)[y] * 4 + rng.normal(size=(len(y), 6))
    return fedhen.FederatedData.from_arrays(x[:60], y[:60], *((x[60:], y[60:]) if tests else ()))
