"""Alg. 2: E epochs of clipped SGD from the received weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedhen.algorithm.local import NOTHING, Correction
from fedhen.algorithm.objectives import Objective
from fedhen.config import TrainingConfig
from fedhen.precision import FULL, Precision


def learning_rate(training: TrainingConfig, number: int, rounds: int) -> float:
    """η in round `number` of `rounds`."""
    schedule = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * (number - 1) / rounds)) / 2}
    risen = min(1.0, number / max(1, training.lr_warmup))
    return training.lr * training.lr_decay ** (number - 1) * schedule[training.lr_schedule] * risen


@dataclass(frozen=True)
class Task:
    """What a device minimises, and how."""

    objective: Objective
    training: TrainingConfig
    lr: float
    correction: Correction = NOTHING
    view: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda logits: logits
    """What of the logits the objective sees."""
    precision: Precision = FULL


def train_locally(module: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], task: Task) -> tuple[float, int]:
    """Train the module in place on the batches of all epochs; returns the mean loss of the steps, and their number.

    The clip is on the gradient of the summed loss over all parameters. SGD adds the decay after it, and leaves alone a
    weight without a gradient: NoSide's exit comes back from a complex device as it went.
    """
    module.train()
    task.precision.choose()
    training, correction = task.training, task.correction
    optimiser = torch.optim.SGD(
        module.parameters(),
        lr=task.lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay + correction.decay,
    )
    losses = []
    for inputs, labels in batches:
        optimiser.zero_grad(set_to_none=True)
        with task.precision.autocast():
            loss = task.objective(task.view(module(inputs)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        correct(module, correction)
        nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimiser.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean()), len(losses)


def correct(module: nn.Module, correction: Correction) -> None:
    """Add a local variant's correction to the gradients."""
    if correction is NOTHING:
        return
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and name in correction.offset:
                parameter.grad.add_(correction.offset[name]).add_(parameter, alpha=correction.pull)
