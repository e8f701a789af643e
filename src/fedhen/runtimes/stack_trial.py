"""Whether the devices of a tier can train as one network: tried once, on a small batch, against the plain module."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhen import seeds
from fedhen.algorithm.objectives import Objective
from fedhen.runtimes.stack_training import per_device
from fedhen.runtimes.stacking import Stacked, mapped, traced
from fedhen.runtimes.trials import Batch, NotForEngines, refuse


class CannotStack(Exception):
    """Why the devices of a tier must train one after the other."""


def stacked(module: nn.Module, objective: Objective, batch: Batch) -> Stacked:
    """The module for several devices; raises CannotStack where it would not compute what the module does.

    The module becomes part of it: some operations borrow its weights for a moment, so that no two stacks may share one.
    """
    module.train()
    with seeds.torch_randomness(0, "stacking"):
        try:
            _check_buffers(module)
            before = [b.clone() for b in module.buffers()]
            refuse(module, objective, batch)
            module(batch[0])
        except NotForEngines as reason:
            raise CannotStack(str(reason)) from None
        if not all(map(torch.equal, before, module.buffers())):
            raise CannotStack("its buffers change in training")
        reasons = []
        for make in (traced, mapped):
            try:
                found = make(module, batch[0])
                _compare(module, found, objective, batch)
                return found
            except Exception as error:
                reasons.append(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
    raise CannotStack(reasons[-1])


def _check_buffers(module: nn.Module) -> None:
    """What training changes beside the parameters has no place in a stack."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if stored := [name for name in module.state_dict() if name not in parameters]:
        raise CannotStack(f"it stores {stored[0]!r} beside its parameters")


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
        # A gradient that ought to cancel out is rounding alone: all are seen beside the largest.
        scale = max(float(g.abs().max()) for g in gradients if g is not None)
        same = [_close(losses[row], loss, float(loss.detach().abs()))]
        for name, stack, one in zip(own, together, gradients, strict=True):
            if stack is None or one is None:
                same.append(stack is one)
            else:
                same.append(_close(found.named(name, stack)[row], one, scale))
        if not all(same):
            raise CannotStack("in a stack it computes something else")


def _close(a: Tensor, b: Tensor, scale: float) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-5 * scale, equal_nan=True)
