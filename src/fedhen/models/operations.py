"""Counts the operations of a pass through a module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fedhen import seeds
from fedhen.data.inputs import Inputs, call_module, map_tensors, take


def count_operations(module: nn.Module, inputs: Inputs) -> int:
    """Returns the operations that the last output takes for one example: two for each multiplication and its addition.

    Convolutions, matrix products and attention are counted, on a copy of the module.
    """
    module = copy.deepcopy(module).cpu().eval()
    with seeds.randomness(0, "operations"), torch.no_grad(), count_all() as counter:
        _ = call_module(module, map_tensors(take(inputs, slice(1)), lambda tensor: tensor.cpu()))[-1]
    return int(counter.get_total_flops())


def count_training_operations(
    module: nn.Module, objective: Callable[[Sequence[Tensor], Tensor], Tensor], inputs: Inputs, targets: Tensor
) -> float:
    """Returns the operations of one example in training: forward, and backward from the objective.

    Mostly a product takes three times its forward operations: backward to its inputs and to its weights. Nothing flows
    back to the examples, to weights that are not trained, or from exits that the objective does not read. The module
    is left on the CPU, in training mode, with gradients.
    """
    module = module.cpu().train()
    inputs, targets = map_tensors(inputs, lambda tensor: tensor.cpu()), targets.cpu()
    with seeds.randomness(0, "operations"), count_all() as counter:
        objective(call_module(module, inputs), targets).backward()  # type: ignore[no-untyped-call]
    return counter.get_total_flops() / len(targets)


@contextmanager
def count_all() -> Iterator[FlopCounterMode]:
    """Counts the operations of what is computed. Fused kernels are off, since theirs are not counted."""
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled, torch.backends.mha.get_fastpath_enabled()
    onednn.enabled = False
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        onednn.enabled = before[0]
        torch.backends.mha.set_fastpath_enabled(before[1])
