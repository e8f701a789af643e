"""What no engine but the plain one can train, tried on a small batch before it is trusted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhen import seeds
from fedhen.algorithm.objectives import Objective
from fedhen.models.exits import Exits
from fedhen.precision import exact_products

Batch = tuple[Tensor, Tensor]
DRAWS = 5
"""Weights at which two forms of a module are compared: most of them decide."""


class NotForEngines(Exception):
    """Why the devices of a tier must train one after the other."""


def refuse(module: nn.Module, objective: Objective, batch: Batch) -> None:
    """Raise NotForEngines where a module, or what it is trained for, is not a function of weights and inputs alone."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if len(parameters) > len(list(module.parameters())):
        raise NotForEngines("some of its weights have two names")
    if len({p.dtype for p in parameters.values()}) > 1:
        raise NotForEngines("its weights have several types")
    inputs, labels = batch
    buffers = [(b, b.clone()) for b in module.buffers()]
    module.train()
    with seeds.torch_randomness(0, "trial"):
        drawn = _random_state(inputs)
        first = module(inputs)
        if isinstance(first, Exits):
            raise NotForEngines("its exits are passes of their own")
        loss, again = objective(first, labels), objective(module(inputs), labels)
        same = all(map(torch.equal, drawn, _random_state(inputs)))
    for buffer, before in buffers:
        buffer.copy_(before)
    if not same or not torch.allclose(loss, again, equal_nan=True):
        raise NotForEngines("it draws random numbers, or changes from call to call")


def agree(module: nn.Module, other: nn.Module, inputs: Tensor) -> bool:
    """Whether two modules over the same parameters compute the same logits and gradients, at most draws of these.

    At each draw it may not look so for forms of one function: where a ReLU or a maximum turns over, rounding alone
    tells them apart.
    """
    agreed = refused = 0
    while max(agreed, refused) <= DRAWS // 2:
        same = _agree_at(agreed + refused, module, other, inputs)
        agreed, refused = agreed + same, refused + (not same)
    return agreed > refused


def _agree_at(draw: int, module: nn.Module, other: nn.Module, inputs: Tensor) -> bool:
    """Whether they do at weights somewhat off their own."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    try:
        with seeds.torch_randomness(0, "trial", draw), exact_products():
            with torch.no_grad():
                for p in parameters:
                    # Norms begin at one and zero, where much looks alike.
                    p.add_(torch.randn_like(p), alpha=0.1 * float(p.abs().mean()) + 0.01)
            found = [_logits_and_gradients(each, inputs, parameters) for each in (module, other)]
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
    largest = max(float(t.norm()) for t in found[0])
    return len(found[0]) == len(found[1]) and all(_near(a, b, largest) for a, b in zip(*found, strict=True))


def _logits_and_gradients(module: nn.Module, inputs: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    logits = list(module(inputs))
    onto = torch.linspace(-1, 1, logits[0].numel(), dtype=logits[0].dtype, device=inputs.device).view_as(logits[0])
    total = torch.stack([(z * onto).sum() for z in logits]).sum()
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return [z.detach() for z in logits] + zeros


def _near(a: Tensor, b: Tensor, largest: float) -> bool:
    # A gradient that ought to cancel out is rounding alone: all are seen beside the largest.
    return bool((a - b).norm() <= 1e-3 * b.norm() + 1e-5 * largest)


def _random_state(where: Tensor) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(where.device)] if where.is_cuda else [])]
