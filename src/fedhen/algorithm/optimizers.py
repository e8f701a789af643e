"""The optimisers of a device: what makes a step of the clipped gradient (Alg. 2, lines 5 and 13).

They are torch's, to the bit, with one call for all weights. For small weights torch's take longer than the arithmetic,
and their import takes seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedhen.config.training_settings import TrainingConfig
from fedhen.params import Weights

Kinds = Mapping[str, Callable[[Tensor], Tensor]]
"""The kinds of state of an optimiser -> what the tensor for a weight is like."""
STEPS = "steps"
"""The kind of state that counts the steps of a weight; all other kinds are as large as the weight."""


def like_weight(weight: Tensor) -> Tensor:
    return weight


def like_count(weight: Tensor) -> Tensor:
    """Returns a number of a type that packs with the weight, and that holds large whole numbers."""
    return weight.new_zeros((), dtype=torch.promote_types(weight.dtype, torch.float32))


@dataclass
class Optimizer(ABC):
    """A step of all weights of a device, and the state from one step to the next."""

    KINDS: ClassVar[Kinds] = {}

    lr: float
    decay: float = 0.0
    """Times the weight, added to its gradient."""
    uncorrected: Collection[str] = field(default=(), kw_only=True)
    """Weights that the local variant leaves alone, with a decay of their own."""
    uncorrected_decay: float = field(default=0.0, kw_only=True)
    moments: defaultdict[str, Weights] = field(default_factory=lambda: defaultdict(dict), kw_only=True)
    """Kind -> weight's name -> tensor. Missing ones stand for zeros."""
    steps: dict[str, int] = field(default_factory=dict, kw_only=True)
    """Weight's name -> the number of its steps, if they are counted."""

    @torch.no_grad()
    def step(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Updates each weight that has a gradient. Overwrites the gradients."""
        names = [name for name, p in parameters.items() if p.grad is not None]
        weights: list[Tensor] = [parameters[name] for name in names]
        gradients = [w.grad for w in weights if w.grad is not None]
        for decay, is_uncorrected in ((self.decay, False), (self.uncorrected_decay, True)):
            if decay and (
                places := [k for k, name in enumerate(names) if (name in self.uncorrected) == is_uncorrected]
            ):
                torch._foreach_add_([gradients[k] for k in places], [weights[k] for k in places], alpha=decay)
        if names:
            self.update(names, weights, gradients)

    @abstractmethod
    def update(self, names: Sequence[str], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Updates the weights in place. The gradients may be overwritten or kept."""

    def load(self, parameters: Mapping[str, nn.Parameter], kept: Mapping[str, Tensor]) -> None:
        """Continues from the state that a device kept. Entries of other things, like a memory, are left alone."""
        for key, tensor in kept.items():
            kind, _, name = key.partition("/")
            if kind not in self.KINDS or name not in parameters:
                continue
            if kind == STEPS:
                self.steps[name] = int(tensor)
            else:
                # A copy, since it is updated in place, and the kept one must survive a failure.
                self.moments[kind][name] = torch.empty_like(parameters[name].detach()).copy_(tensor)

    def keep(self, like: Mapping[str, Tensor]) -> Weights:
        """Returns the state to keep, with the names, shapes and types of `like`; zeros for weights without a step."""
        kept: Weights = {}
        for key, tensor in like.items():
            kind, _, name = key.partition("/")
            if kind == STEPS:
                kept[key] = torch.full_like(tensor, self.steps.get(name, 0))
            else:
                kept[key] = self.moments[kind].get(name, torch.zeros(())).to(tensor).expand(tensor.shape)
        return kept

    def moment(self, kind: str, name: str, weight: Tensor) -> Tensor:
        """Returns the tensor of that kind for a weight, zeros before its first step."""
        if name not in self.moments[kind]:
            self.moments[kind][name] = torch.zeros_like(weight)
        return self.moments[kind][name]


@dataclass
class Sgd(Optimizer):
    """`torch.optim.SGD`."""

    KINDS: ClassVar[Kinds] = {"momentum": like_weight}

    momentum: float = 0.0

    def update(self, names: Sequence[str], weights: list[Tensor], gradients: list[Tensor]) -> None:
        if self.momentum:
            kept = self.moments["momentum"]
            gradients = [
                kept[name].mul_(self.momentum).add_(gradient) if name in kept else gradient
                for name, gradient in zip(names, gradients, strict=True)
            ]
            kept.update(zip(names, gradients, strict=True))
        torch._foreach_add_(weights, gradients, alpha=-self.lr)


@dataclass
class Adam(Optimizer):
    """`torch.optim.Adam`, and `torch.optim.AdamW` if the weight decay is decoupled.

    `decay` is part of the gradient, so that it enters the moments; `decoupled` shrinks the weights beside the step.
    """

    KINDS: ClassVar[Kinds] = {"mean": like_weight, "square": like_weight, STEPS: like_count}

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decoupled: float = 0.0

    def update(self, names: Sequence[str], weights: list[Tensor], gradients: list[Tensor]) -> None:
        self.steps.update({name: self.steps.get(name, 0) + 1 for name in names})
        counts = [self.steps[name] for name in names]
        means, squares = (
            [self.moment(kind, name, weight) for name, weight in zip(names, weights, strict=True)]
            for kind in ("mean", "square")
        )
        if self.decoupled:
            torch._foreach_mul_(weights, 1 - self.lr * self.decoupled)
        torch._foreach_lerp_(means, gradients, 1 - self.beta1)
        torch._foreach_mul_(squares, self.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - self.beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [(1 - self.beta2**count) ** 0.5 for count in counts])
        torch._foreach_add_(roots, self.epsilon)
        torch._foreach_addcdiv_(weights, means, roots, [-self.lr / (1 - self.beta1**count) for count in counts])


def make_adam(training: TrainingConfig, lr: float, decay: float, decoupled: float) -> Adam:
    return Adam(lr, decay, beta1=training.beta1, beta2=training.beta2, epsilon=training.epsilon, decoupled=decoupled)


OPTIMIZERS: Mapping[str, Callable[[TrainingConfig, float, float], Optimizer]] = {
    "sgd": lambda training, lr, pull: Sgd(lr, training.weight_decay + pull, momentum=training.momentum),
    "adam": lambda training, lr, pull: make_adam(training, lr, training.weight_decay + pull, 0.0),
    # FedDyn's pull is a term of the objective: it belongs to the gradient even where the weight decay does not.
    "adamw": lambda training, lr, pull: make_adam(training, lr, pull, training.weight_decay),
}
"""`training.optimizer` -> (settings, η in this round, `Correction.decay`) -> an optimiser without state."""


def make_optimizer(
    training: TrainingConfig, lr: float, pull: float = 0.0, uncorrected: Collection[str] = ()
) -> Optimizer:
    """Makes the configured optimiser.

    `pull` is what the local variant adds to the gradient after the clip, times w, of weights that it corrects.
    """
    make = OPTIMIZERS[training.optimizer]
    found = make(training, lr, pull)
    if uncorrected:
        found.uncorrected, found.uncorrected_decay = uncorrected, make(training, lr, 0.0).decay
    return found


def kept_state_like(training: TrainingConfig, learned: Mapping[str, Tensor]) -> Weights:
    """Returns tensors with the names, shapes and types of the state that a device keeps of its optimiser.

    Nothing, unless `training.optimizer_state` is "device". The values are not used.
    """
    if training.optimizer_state == "round":
        return {}
    kinds = make_optimizer(training, training.lr).KINDS
    return {f"{kind}/{name}": like(weight) for kind, like in kinds.items() for name, weight in learned.items()}
