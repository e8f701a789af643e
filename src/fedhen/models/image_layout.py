"""Chooses the memory layout and the library with which a CPU computes an image network.

Most networks are faster with the channels last: 1.0 to 1.4 times with one torch thread, measured over widths 4 to 64,
images of 8 to 32 pixels and batches of 10 and 50. They are slower with grouped convolutions and small batches (0.88 to
0.98), and in bf16 with norms over fewer than 32 channels (0.6 to 0.97). Small convolutions with the channels last are
faster without oneDNN (1.0 to 3.2 times up to 4 million multiplications in a batch, 0.8 to 0.95 above).
The rules depend on layers and shapes, never on a clock, so that the same seed gives the same bytes everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from fedhen import seeds
from fedhen.data.inputs import Inputs
from fedhen.hardware.precision import Precision

FEW = 32
"""A norm over fewer channels is slow in bf16 with the channels last."""
SMALL = 2.5e6
"""A convolution of fewer multiplications is faster without oneDNN."""
MARK = "_fedhen_small_convolutions"


def apply_image_layout(module: nn.Module, sample: Inputs, precision: Precision, batch_size: int) -> nn.Module:
    """Converts a module's weights, and from now on its inputs, to the layout that is faster on a CPU."""
    if not isinstance(sample, Tensor) or sample.is_cuda or sample.dim() != 4:
        return module
    if not is_faster_with_channels_last(module, precision):
        return module
    work = _count_multiplications(module, sample)
    if work:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        module.register_forward_pre_hook(to_channels_last)
        setattr(module, MARK, precision.name == "fp32" and mean(work) * batch_size < SMALL)
    return module


def is_faster_with_channels_last(module: nn.Module, precision: Precision) -> bool:
    """Returns whether a network of these layers is faster with the channels last."""
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in module.modules() if isinstance(layer, nn.GroupNorm)]
    if precision.name == "bf16" and any(norm.num_channels < FEW for norm in norms):
        return False
    return bool(convolutions) and all(layer.groups == 1 for layer in convolutions)


@contextmanager
def fast_convolutions(module: nn.Module) -> Iterator[None]:
    """Computes the module's convolutions with the library that is faster for them."""
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled
    onednn.enabled = before and not getattr(module, MARK, False)
    try:
        yield
    finally:
        onednn.enabled = before


def _count_multiplications(module: nn.Module, sample: Tensor) -> list[float]:
    """Counts each convolution's multiplications for one image; returns [] if the module does not work channels last.

    A copy must compute the same logits in both layouts: a `view` may fail where a `reshape` would not.
    """
    found: list[float] = []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        found.append(output[0].numel() * layer.weight[0].numel())

    try:
        clone = copy.deepcopy(module).eval()
        with seeds.randomness(0, "layout"), torch.no_grad():
            before = list(clone(sample))
            clone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            for layer in clone.modules():
                if isinstance(layer, nn.Conv2d):
                    layer.register_forward_hook(count)
            after = list(clone(sample.contiguous(memory_format=torch.channels_last)))
    except RuntimeError:
        return []
    pairs = zip(before, after, strict=True)
    same = all(torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True) for one, other in pairs)
    return found if same else []


def to_channels_last(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Converts a module's first input; a hook that is called before each of its passes."""
    first, *others = inputs
    return (first.contiguous(memory_format=torch.channels_last), *others)
