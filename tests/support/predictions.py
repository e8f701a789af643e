"""A small run and a family for tests of predictions, and how right they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedhen
from fedhen.cli import main
from fedhen.models.loaded_model import LoadedModel

SMALL: dict[str, Any] = {
    "rounds": 1,
    "devices": {"number": 4, "active": 2},
    "training": {"epochs": 1, "batch_size": 8},
    "runtime": {"workers": 1},
    "accelerator": "cpu",
}


class Net(nn.Module):
    """Two linear exits for inputs of any shape, and a method of a name that `LoadedModel` has too."""

    def __init__(self, inputs: int, outputs: int, deep: bool) -> None:
        super().__init__()
        self.body = nn.Linear(inputs, 8)
        self.exit = nn.Linear(8, outputs)
        self.top = nn.Linear(8, outputs) if deep else None

    def predict(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x.flatten(1)))

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.predict(x)
        return [self.exit(h)] if self.top is None else [self.exit(h), self.top(h)]


def family(inputs: int, outputs: int) -> fedhen.Family:
    return fedhen.Family({"simple": lambda: Net(inputs, outputs, False), "complex": lambda: Net(inputs, outputs, True)})


def command(*arguments: str) -> None:
    assert main([*arguments, "--quiet", "--accelerator", "cpu"]) == 0


def last_accuracy(folder: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])["accuracy"]
    return found


def share_right(model: LoadedModel, raw: Any, names: list[str]) -> float:
    """Returns the accuracy of the predicted names, as a share of the examples."""
    found = [prediction.value for prediction in model.predict(raw)]
    return sum(map(str.__eq__, found, names)) / len(names)
