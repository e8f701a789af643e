"""Modules tried on a small batch before they are trusted: what only the plain engine can train, which forms are one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedhen import seeds
from fedhen.algorithm.objectives import Objective
from fedhen.hardware.precision import exact_products
from fedhen.models.exits import Exits

Batch = tuple[Tensor, Tensor]
MAX_DRAWS = 20
"""At so many weights, at most, are two forms of a module compared."""
DECIDING_DRAWS = 3
"""So many of these must say that the forms are the same, before as many say that they are not."""
KINK_FACTOR = 20
"""Up to so many times what rounding explains, a draw says nothing: a ReLU or a maximum may have turned over in it.

Seen with the paper's complex network and its exit pooled to 1×1: 1 to 5 times, at three of the first five draws.
"""


class UnsupportedModule(Exception):
    """Why the devices of a tier must train one after the other."""


def check_supported(module: nn.Module, objective: Objective, batch: Batch) -> None:
    """Raise UnsupportedModule unless module and objective are functions of weights and inputs alone."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if len(parameters) > len(list(module.parameters())):
        raise UnsupportedModule("some of its weights have two names")
    if len({p.dtype for p in parameters.values()}) > 1:
        raise UnsupportedModule("its weights have several types")
    inputs, labels = batch
    module.train()
    with _restoring(module.buffers()), seeds.randomness(0, "trial"):
        drawn = _random_state(inputs)
        first = module(inputs)
        if isinstance(first, Exits):
            raise UnsupportedModule("its exits are passes of their own")
        loss, again = objective(first, labels), objective(module(inputs), labels)
        same = all(map(torch.equal, drawn, _random_state(inputs)))
    if not same or not torch.allclose(loss, again, equal_nan=True):
        raise UnsupportedModule("it draws random numbers, or changes from call to call")


def forms_agree(module: nn.Module, other: nn.Module, inputs: Tensor) -> bool:
    """Whether two modules over the same parameters compute the same logits and gradients.

    They are compared at draws of the parameters. At some of these, two forms of one function may look different, since
    at a kink rounding alone decides which slope it has.
    """
    same = different = 0
    for draw in range(MAX_DRAWS):
        error = _gradient_error(draw, module, other, inputs)
        same, different = same + (error <= 1), different + (not error <= KINK_FACTOR)
        if DECIDING_DRAWS in (same, different):
            break
    return same == DECIDING_DRAWS


def _gradient_error(draw: int, module: nn.Module, other: nn.Module, inputs: Tensor) -> float:
    """How far apart their gradients are, as a multiple of what rounding explains, at weights somewhat off their own.

    Infinitely far, where their logits are further apart than that: a kink bends a function and does not break it.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    with _restoring([*parameters, *module.buffers()]), seeds.randomness(0, "trial", draw), exact_products():
        with torch.no_grad():
            for p in parameters:
                # Norms begin at one and zero, where much looks alike.
                p.add_(torch.randn_like(p), alpha=0.1 * float(p.abs().mean()) + 0.01)
        (logits, gradients), (others, of_others) = (
            _logits_and_gradients(each, inputs, parameters) for each in (module, other)
        )
    if len(logits) != len(others) or not _relative_error(logits, others) <= 1:
        return float("inf")
    return _relative_error(gradients, of_others)


def _logits_and_gradients(
    module: nn.Module, inputs: Tensor, parameters: list[nn.Parameter]
) -> tuple[list[Tensor], list[Tensor]]:
    logits = list(module(inputs))
    onto = torch.linspace(-1, 1, logits[0].numel(), dtype=logits[0].dtype, device=inputs.device).view_as(logits[0])
    total = torch.stack([(z * onto).sum() for z in logits]).sum()
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    slopes = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return [z.detach() for z in logits], slopes


def _relative_error(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference of two tensors, as a multiple of what rounding explains."""
    # A gradient that ought to cancel out is rounding alone: all are seen beside the largest, which may be zero too.
    least = 1e-5 * max(float(_norm(t)) for t in one) + 1e-30
    found = [_norm(a - b) / (1e-3 * _norm(b) + least) for a, b in zip(one, other, strict=True)]
    return float(torch.stack(found).max())


def _norm(tensor: Tensor) -> Tensor:
    # In half precision the least of these would be zero.
    size: Tensor = tensor.float().norm()
    return size


@contextmanager
def _restoring(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Whatever a trial does to them, they are afterwards as they were."""
    before = [(t, t.detach().clone()) for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for t, value in before:
                t.copy_(value)


def _random_state(where: Tensor) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(where.device)] if where.is_cuda else [])]
