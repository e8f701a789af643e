"""Alg. 2: E epochs of clipped SGD from the received weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedhen.algorithm.objectives import Objective
from fedhen.config import TrainingConfig


def learning_rate(training: TrainingConfig, number: int, rounds: int) -> float:
    """η in round `number` of `rounds`."""
    schedule = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * (number - 1) / rounds)) / 2}
    return training.lr * training.lr_decay ** (number - 1) * schedule[training.lr_schedule]


def train_locally(
    module: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    objective: Objective,
    training: TrainingConfig,
    *,
    lr: float,
) -> float:
    """Train the module in place on the batches of all epochs; returns the mean loss of the steps.

    The clip is on the gradient of the summed loss over all parameters. SGD adds the decay after it, and leaves alone a
    weight without a gradient: NoSide's exit comes back from a complex device as it went.
    """
    module.train()
    optimiser = torch.optim.SGD(
        module.parameters(), lr=lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    losses = []
    for inputs, labels in batches:
        optimiser.zero_grad(set_to_none=True)
        loss = objective(module(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimiser.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())
