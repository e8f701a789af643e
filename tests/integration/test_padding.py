"""Batches of padding alone contribute nothing, and a device of padding alone is left out and reported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedhen
from fedhen.data.batches import plan_visits
from fedhen.seeds import DeviceStreams

PADDING = -100
SETTINGS: dict[str, Any] = {
    "rounds": 1,
    "tiers": {"simple": 1.0},
    "devices": {"active": 2},
    "training": {"epochs": 2, "batch_size": 1, "lr": 0.1, "weight_decay": 0.5, "clip": 1e9},
    "runtime": {"workers": 1},
}


class Words(nn.Module):
    """The next of five words, from the word alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, ids: Tensor) -> list[Tensor]:
        return [self.table(ids)]


FAMILY = fedhen.Family({"simple": Words})
IDS = torch.arange(24).view(8, 3) % 5
TARGETS = (IDS + 1) % 5


def padded(*rows: int) -> Tensor:
    """The targets with these rows as padding alone, and one word of another row too."""
    targets = TARGETS.clone()
    targets[0, 0] = PADDING
    targets[list(rows)] = PADDING
    return targets


def train_by_hand(weights: Tensor, targets: Tensor, device: int) -> tuple[Tensor, list[float]]:
    """SGD with decay on the device's visits, without those of padding alone."""
    table, losses = weights.clone().double().requires_grad_(), []
    for row in plan_visits(np.arange(8), 2, 1, False, DeviceStreams(0, (1, device))).examples:
        kept = targets[row] != PADDING
        if kept.any():
            loss = functional.cross_entropy(table[IDS[row][kept]], targets[row][kept])
            (gradient,) = torch.autograd.grad(loss, table)
            table.data -= 0.1 * (gradient + 0.5 * table.data)
            losses.append(loss.item())
    return table.detach(), losses


@pytest.mark.parametrize("local", ["plain", "scaffold"])
def test_a_batch_of_padding_alone_makes_no_step(local: str) -> None:
    by_device = [padded(2, 5, 6), padded(1)]
    data = fedhen.per_device([(IDS, targets) for targets in by_device], IDS, TARGETS)
    run = fedhen.train(FAMILY, data, task="language-modelling", local={"name": local}, accelerator="cpu", **SETTINGS)
    start = FAMILY.initial(0)["table.weight"]
    trained = [train_by_hand(start, targets, device) for device, targets in enumerate(by_device)]
    assert [len(losses) for _, losses in trained] == [10, 14]
    expected = torch.stack([table for table, _ in trained]).mean(0)
    torch.testing.assert_close(run.model("simple").state_dict()["table.weight"].double(), expected, rtol=0, atol=1e-6)
    assert run.rounds[0]["loss"] == pytest.approx(np.mean([np.mean(losses) for _, losses in trained]), rel=1e-5)


def test_a_device_of_padding_alone_is_left_out_and_reported(tmp_path: Path) -> None:
    data = fedhen.per_device([(IDS, padded()), (IDS, torch.full_like(TARGETS, PADDING))], IDS, TARGETS)
    with pytest.warns(UserWarning, match="a device failed"):
        run = fedhen.train(FAMILY, data, task="language-modelling", out=tmp_path / "run", accelerator="cpu", **SETTINGS)
    assert run.rounds[0]["failed"] == [1] and math.isfinite(run.rounds[0]["loss"])
    (line,) = (tmp_path / "run" / "errors.jsonl").read_text().splitlines()
    assert json.loads(line)["error"] == "ValueError: none of its targets counts: all of them are padding"
