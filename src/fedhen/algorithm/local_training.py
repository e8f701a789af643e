"""Alg. 2, local training: E epochs of steps of clipped gradients, from the received weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from fedhen.algorithm.gradients import FOLLOW_LOSS, Batch, Gradient, LossOf
from fedhen.algorithm.local_variants import NO_CORRECTION, Correction
from fedhen.algorithm.objectives import Objective
from fedhen.algorithm.optimizers import Optimizer, make_optimizer
from fedhen.config.training_settings import TrainingConfig
from fedhen.hardware.precision import FULL, Precision


def learning_rate(training: TrainingConfig, number: int, rounds: int) -> float:
    """Returns η in round `number` of `rounds`."""
    schedule = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * (number - 1) / rounds)) / 2}
    warmup = min(1.0, number / max(1, training.lr_warmup))
    return training.lr * training.lr_decay ** (number - 1) * schedule[training.lr_schedule] * warmup


@dataclass(frozen=True)
class LocalProblem:
    """What a device minimises in a round, and with which settings."""

    objective: Objective
    training: TrainingConfig
    lr: float
    """η in this round."""
    correction: Correction = NO_CORRECTION
    """What the local variant adds to the gradient."""
    mask: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda logits: logits
    """Applied to the logits before the objective: `training.masked_loss` hides classes that the device lacks."""
    precision: Precision = FULL
    gradient: Gradient = FOLLOW_LOSS
    """How the gradient of a step is computed, and from how many batches."""
    clips: bool = True


def train_locally(
    module: nn.Module,
    batches: Iterable[Batch],
    problem: LocalProblem,
    optimizer: Optimizer | None = None,
) -> tuple[float, int]:
    """Trains a module in place on the batches of all epochs. Returns the mean loss of the steps, and their number.

    The gradient of the summed loss over all parameters is clipped; the optimiser adds the weight decay afterwards. A
    weight without a gradient does not change: NoSide's complex devices return the simple exit as they received it.
    The optimiser is the configured one, without state, unless one is given.
    """
    module.train()
    problem.precision.choose()
    optimizer = optimizer or make_optimizer(problem.training, problem.lr, problem.correction.decay)
    named, losses = dict(module.named_parameters()), list[Tensor]()
    parameters, loss_of = list(named.values()), LossOf(module, problem.objective, problem.mask, problem.precision)
    for together in group_batches(batches, problem.gradient.batches):
        for parameter in parameters:
            parameter.grad = None
        losses.append(problem.gradient.compute(loss_of, together))
        apply_correction(module, problem.correction)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if problem.clips:
            clip_gradients(gradients, problem.training.clip)
        optimizer.step(named)
    return float(torch.stack(losses).mean()), len(losses)


def group_batches(batches: Iterable[Batch], number: int) -> Iterator[list[Batch]]:
    """Yields groups of `number` batches. A short last group is left out, unless it is the only one: it then repeats."""
    left, is_first = iter(batches), True
    while group := list(islice(left, number)):
        if len(group) == number or is_first:
            yield [group[k % len(group)] for k in range(number)]
        is_first = False


@contextmanager
def freeze(module: nn.Module, frozen: Collection[str]) -> Iterator[None]:
    """Keeps some weights as they are. On exit they can be trained as before."""
    kept = [p for name, p in module.named_parameters() if name in frozen and p.requires_grad]
    for parameter in kept:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in kept:
            parameter.requires_grad_(True)
            parameter.grad = None


def clip_gradients(gradients: list[Tensor], max_norm: float) -> None:
    """Scales gradients to a total norm of at most `max_norm`: `nn.utils.clip_grad_norm_`, to the bit."""
    if gradients:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        # Nothing changes if it is 1. On a GPU, reading it would take longer than the product. A NaN is not 1.
        if scale.is_cuda or scale.item() != 1.0:
            torch._foreach_mul_(gradients, scale)


def apply_correction(module: nn.Module, correction: Correction) -> None:
    if correction is NO_CORRECTION:
        return
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and name in correction.offset:
                parameter.grad.add_(correction.offset[name]).add_(parameter, alpha=correction.pull)
