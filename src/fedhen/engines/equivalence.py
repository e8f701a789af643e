"""Checks modules on a small batch: which need the sequential engine, and whether two forms compute the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedhen import seeds
from fedhen.algorithm.objectives import Objective
from fedhen.hardware.precision import exact_products
from fedhen.models.lazy_exits import LazyExits

Batch = tuple[Tensor, Tensor]
MAX_DRAWS = 20
"""Two forms of a module are compared at no more than this many random weights."""
DECIDING_DRAWS = 3
"""The comparison ends when this many draws agree that the forms are the same, or that they differ."""
KINK_FACTOR = 20
"""A draw whose error is at most this many times that of rounding does not count as a difference.

A ReLU or a maximum may have switched sides. With the paper's complex network and its exit pooled to 1×1 the error was
1 to 5 times that of rounding, at three of the first five draws.
"""


class UnsupportedModule(Exception):
    """A module that only the sequential engine can train; the message says why."""


def check_supported(module: nn.Module, objective: Objective, batch: Batch) -> None:
    """Raises UnsupportedModule unless module and objective depend on weights and inputs alone."""
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
        if isinstance(first, LazyExits):
            raise UnsupportedModule("its exits are passes of their own")
        loss, again = objective(first, labels), objective(module(inputs), labels)
        same = all(map(torch.equal, drawn, _random_state(inputs)))
    if not same or not torch.allclose(loss, again, equal_nan=True):
        raise UnsupportedModule("it draws random numbers, or changes from call to call")


def forms_agree(module: nn.Module, other: nn.Module, inputs: Tensor) -> bool:
    """Returns whether two modules over the same parameters compute the same logits and gradients.

    They are compared at random parameters. At some of these, two forms of one function may differ, because at a kink
    rounding decides which slope is taken.
    """
    same = different = 0
    for draw in range(MAX_DRAWS):
        error = _gradient_error(draw, module, other, inputs)
        same, different = same + (error <= 1), different + (not error <= KINK_FACTOR)
        if DECIDING_DRAWS in (same, different):
            break
    return same == DECIDING_DRAWS


def _gradient_error(draw: int, module: nn.Module, other: nn.Module, inputs: Tensor) -> float:
    """Returns the difference of their gradients near their weights, as a multiple of the error of rounding.

    It is infinite if their logits differ by more than rounding: a kink changes the slope, not the value.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    with _restoring([*parameters, *module.buffers()]), seeds.randomness(0, "trial", draw), exact_products():
        with torch.no_grad():
            for p in parameters:
                # Norms start at one and zero, where different functions may look the same.
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
    """Returns the largest difference of two tensors, as a multiple of the error of rounding."""
    # A gradient that cancels out consists of rounding errors, so all are compared with the largest, which may be 0.
    least = 1e-5 * max(float(_norm(t)) for t in one) + 1e-30
    found = [_norm(a - b) / (1e-3 * _norm(b) + least) for a, b in zip(one, other, strict=True)]
    return float(torch.stack(found).max())


def _norm(tensor: Tensor) -> Tensor:
    # In half precision the smallest would be zero.
    size: Tensor = tensor.float().norm()
    return size


@contextmanager
def _restoring(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restores the values of these tensors at the end."""
    before = [(t, t.detach().clone()) for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for t, value in before:
                t.copy_(value)


def _random_state(where: Tensor) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(where.device)] if where.is_cuda else [])]
