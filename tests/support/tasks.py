"""A small run, and a family with outputs of any shape, for tests of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedhen

SMALL: dict[str, Any] = {
    "rounds": 3,
    "devices": {"number": 6, "active": 4},
    "training": {"epochs": 1, "batch_size": 8, "lr": 0.05},
    "evaluation": {"every": 1},
    "runtime": {"workers": 1},
}


class Net(nn.Module):
    """A body, an exit, and a second body with an exit, for outputs of any shape."""

    def __init__(self, shape: Sequence[int], deep: bool) -> None:
        super().__init__()
        size = int(np.prod(shape))
        self.shape = tuple(shape)
        self.body, self.exit = nn.Linear(4, 6), nn.Linear(6, size)
        self.deep = nn.Linear(6, 6) if deep else None
        self.top = nn.Linear(6, size) if deep else None

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.body(x).tanh()
        outputs = [self.exit(h)]
        if self.deep is not None and self.top is not None:
            outputs.append(self.top(self.deep(h).tanh()))
        return [z.view(len(x), *self.shape) for z in outputs]


def family(*shape: int) -> fedhen.Family:
    return fedhen.Family({"simple": lambda: Net(shape, False), "complex": lambda: Net(shape, True)})


def inputs(number: int, seed: int) -> Tensor:
    return torch.randn(number, 4, generator=torch.Generator().manual_seed(seed))
