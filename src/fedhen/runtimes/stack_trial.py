"""Whether the devices of a tier can train as one network: tried once, on a small batch, against the plain module."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhen import seeds
from fedhen.algorithm.objectives import Objective
from fedhen.models.exits import Exits
from fedhen.runtimes.stack_training import per_device
from fedhen.runtimes.stacking import Stacked, mapped, traced

Batch = tuple[Tensor, Tensor]


class CannotStack(Exception):
    """Why the devices of a tier must train one after the other."""


def stacked(module: nn.Module, objective: Objective, batch: Batch) -> Stacked:
    """The module for several devices; raises CannotStack where it would not compute what the module does.

    The module becomes part of it: some operations borrow its weights for a moment, so that no two stacks may share one.
    """
    module.train()
    with seeds.torch_randomness(0, "stacking"):
        _check_module(module, batch[0])
        reasons = []
        for make in (traced, mapped):
            try:
                found = make(module, batch[0])
                _compare(module, found, objective, batch)
                return found
            except Exception as error:
                reasons.append(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
    raise CannotStack(reasons[-1])


def _check_module(module: nn.Module, inputs: Tensor) -> None:
    """What training changes beside the parameters, or draws at random, has no place in a stack."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if len(parameters) > len(list(module.parameters())):
        raise CannotStack("some of its weights have two names")
    if len({p.dtype for p in parameters.values()}) > 1:
        raise CannotStack("its weights have several types")
    if stored := [name for name in module.state_dict() if name not in parameters]:
        raise CannotStack(f"it stores {stored[0]!r} beside its parameters")
    before, drawn = {n: b.clone() for n, b in module.named_buffers()}, torch.get_rng_state()
    first = module(inputs)
    if isinstance(first, Exits):
        raise CannotStack("its exits are passes of their own")
    second = module(inputs)
    if not torch.equal(drawn, torch.get_rng_state()) or not all(map(torch.equal, first, second)):
        raise CannotStack("it draws random numbers, or changes from call to call")
    if not all(torch.equal(before[n], b) for n, b in module.named_buffers()):
        raise CannotStack("its buffers change in training")


def _compare(module: nn.Module, found: Stacked, objective: Objective, batch: Batch) -> None:
    """Two devices with unlike weights and inputs, in one stack and one after the other."""
    inputs, labels = batch
    own = {n: p.detach() for n, p in module.named_parameters()}
    devices = [own, {n: p * 0.9 for n, p in own.items()}]
    x, y = torch.stack([inputs, inputs.flip(0)], 1), torch.stack([labels, labels.flip(0)], 1)
    weights = {n: found.kept(n, torch.stack([d[n] for d in devices])).requires_grad_() for n in own}
    losses = per_device(objective, False)(found.forward(weights, x), y, y.T)
    together = torch.autograd.grad(losses.sum(), list(weights.values()), allow_unused=True)
    for row, device in enumerate(devices):
        alone = {n: w.clone().requires_grad_() for n, w in device.items()}
        loss = objective(functional_call(module, alone, (x[:, row],)), y[:, row])
        gradients = torch.autograd.grad(loss, list(alone.values()), allow_unused=True)
        expected = [loss, *(g for g in gradients if g is not None)]
        stack = [found.named(n, g)[row] for n, g in zip(own, together, strict=True) if g is not None]
        if not all(map(_close, [losses[row], *stack], expected)):
            raise CannotStack("in a stack it computes something else")


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * (1 + float(b.detach().abs().max())), equal_nan=True)
