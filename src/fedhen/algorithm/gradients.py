"""How the gradient of a step is computed from batches: that of the loss, or that of the loss after inner steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedhen.algorithm.objectives import Objective
from fedhen.data.inputs import Inputs, call_module
from fedhen.hardware.precision import FULL, Precision

Batch = tuple[Inputs, Tensor]


class LossOf(nn.Module):
    """The loss of a module on a batch, as a module, so that it can be computed with other weights too."""

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        mask: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda logits: logits,
        precision: Precision = FULL,
    ) -> None:
        super().__init__()
        self.module, self.objective, self.mask, self.autocast = module, objective, mask, precision.autocast()

    def forward(self, inputs: Inputs, targets: Tensor) -> Tensor:
        # Within one call: the exits of some modules are computed when the objective reads them.
        with self.autocast:
            return self.objective(self.mask(call_module(self.module, inputs)), targets)


class Gradient(Protocol):
    """Computes the gradient of a step: the seam of meta-learning.

    `FollowLoss` is the paper's.
    """

    @property
    def batches(self) -> int:
        """The number of batches that a step takes."""
        ...

    def compute(self, loss_of: LossOf, batches: Sequence[Batch]) -> Tensor:
        """Sets the gradient of every weight that the loss reaches. Returns the loss of the step.

        The weights themselves are the same afterwards.
        """
        ...


@dataclass(frozen=True)
class FollowLoss:
    """The gradient of the loss on one batch (Alg. 2, lines 4 and 12)."""

    batches: int = 1

    def compute(self, loss_of: LossOf, batches: Sequence[Batch]) -> Tensor:
        loss: Tensor = loss_of(*batches[0])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


FOLLOW_LOSS = FollowLoss()


@dataclass(frozen=True)
class FirstOrder:
    """∇f(w̃; D′) with w̃ after inner steps w̃ ← w̃ − α∇f(w̃; D) (Per-FedAvg FO, Fallah et al. 2020)."""

    alpha: float
    steps: int = 1
    batches: int = 2

    def compute(self, loss_of: LossOf, batches: Sequence[Batch]) -> Tensor:
        inner, outer = batches
        weights = list_weights(loss_of)
        before = [weight.detach().clone() for weight in weights]
        for _ in range(self.steps):
            move(weights, differentiate(loss_of, inner, weights)[1], -self.alpha)
        loss, gradients = differentiate(loss_of, outer, weights)
        restore(weights, before)
        set_gradients(weights, gradients)
        return loss


@dataclass(frozen=True)
class HessianFree:
    """g − α·[∇f(w + δg; D″) − ∇f(w − δg; D″)]/(2δ), with g = ∇f(w − α∇f(w; D); D′) (Per-FedAvg HF)."""

    alpha: float
    delta: float
    batches: int = 3

    def compute(self, loss_of: LossOf, batches: Sequence[Batch]) -> Tensor:
        *first, third = batches
        weights = list_weights(loss_of)
        loss = FirstOrder(self.alpha).compute(loss_of, first)
        outer = [weight.grad for weight in weights]
        before, sides = [weight.detach().clone() for weight in weights], []
        for sign in (1, -1):
            move(weights, outer, sign * self.delta)
            sides.append(differentiate(loss_of, third, weights)[1])
            restore(weights, before)
        factor = self.alpha / (2 * self.delta)
        set_gradients(
            weights,
            [
                g if g is None or up is None or down is None else g - factor * (up - down)
                for g, up, down in zip(outer, *sides, strict=True)
            ],
        )
        return loss


@dataclass(frozen=True)
class ThroughInnerSteps:
    """The gradient of f(w̃; D′) with respect to w, through the inner steps that make w̃ (MAML, Finn et al. 2017)."""

    alpha: float
    steps: int = 1
    batches: int = 2

    def compute(self, loss_of: LossOf, batches: Sequence[Batch]) -> Tensor:
        inner, outer = batches
        named = {name: weight for name, weight in loss_of.named_parameters() if weight.requires_grad}
        adapted: dict[str, Tensor] = dict(named)
        # Fused attention has no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(self.steps):
                loss = functional_call(loss_of, adapted, inner)
                gradients = torch.autograd.grad(loss, list(adapted.values()), create_graph=True, allow_unused=True)
                adapted = {
                    name: weight if gradient is None else weight - self.alpha * gradient
                    for (name, weight), gradient in zip(adapted.items(), gradients, strict=True)
                }
            loss = functional_call(loss_of, adapted, outer)
            loss.backward()
        found: Tensor = loss.detach()
        return found


def list_weights(loss_of: LossOf) -> list[nn.Parameter]:
    """Returns the weights that are trained."""
    return [weight for weight in loss_of.parameters() if weight.requires_grad]


def differentiate(loss_of: LossOf, batch: Batch, weights: Sequence[nn.Parameter]) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the loss on a batch and its gradient; None for a weight that it does not reach."""
    loss: Tensor = loss_of(*batch)
    return loss.detach(), list(torch.autograd.grad(loss, list(weights), allow_unused=True))


@torch.no_grad()
def move(weights: Sequence[Tensor], directions: Sequence[Tensor | None], factor: float) -> None:
    for weight, direction in zip(weights, directions, strict=True):
        if direction is not None:
            weight.add_(direction, alpha=factor)


@torch.no_grad()
def restore(weights: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, before, strict=True):
        weight.copy_(value)


def set_gradients(weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
