"""Exact sums of weights as whole multiples of a small step, so that neither order nor grouping matters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedhen.params import pack

STEPS = 2.0**36
"""Steps in 1.0: a weight is rounded once, by at most 2^-37, about 7e-12."""
LIMIT = 2.0**62
"""The sum over all devices stays below it, so that it cannot overflow."""

BLOCK = 1 << 17
"""Weights that a CPU converts at a time. The system takes longer to provide larger temporaries than the sums take."""


def split_blocks(vector: Tensor) -> Iterator[slice]:
    """Yields the parts of packed weights to convert one after the other: on a GPU all at once."""
    size = BLOCK if vector.device.type == "cpu" else max(1, len(vector))
    for begin in range(0, len(vector), size):
        yield slice(begin, begin + size)


class FixedPoint:
    """Converts the packed weights of one tier to int64, for sums over a number of devices.

    A weight saturates at ±2^26 / devices: 671,088 for 100 devices, 6,710 for 10,000. Integers, like a layer's count of
    batches, are not scaled.
    """

    def __init__(self, like: Mapping[str, Tensor], devices: int) -> None:
        self.devices = devices
        self.most = LIMIT / devices
        self.warned = False
        self.steps: float | Tensor = STEPS
        if not all(tensor.is_floating_point() for tensor in like.values()):
            kinds = {
                n: t.new_full(t.shape, STEPS if t.is_floating_point() else 1.0, dtype=torch.float64)
                for n, t in like.items()
            }
            self.steps = pack(kinds)

    def of(self, vector: Tensor, part: slice = slice(None)) -> Tensor:
        """Returns packed weights, or a part of them, as whole numbers of steps."""
        steps = self.steps[part] if isinstance(self.steps, Tensor) else self.steps
        whole = vector[part].to(torch.float64, copy=True).mul_(steps).round_()
        low, high = whole.aminmax()
        if bool(torch.maximum(-low, high) > self.most):
            whole.clamp_(-self.most, self.most)
            if not self.warned:
                self.warned = True
                bound = f"{self.most / STEPS:,.0f}"
                warnings.warn(f"weights beyond ±{bound} are clipped to it in the all-devices average", stacklevel=2)
        return whole.long()

    def mean(self, total: Tensor) -> Tensor:
        """Returns the mean over all devices of weights whose sum is `total`, in float64."""
        return total.double().div_(self.devices).div_(self.steps)
