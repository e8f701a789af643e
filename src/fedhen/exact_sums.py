"""Exact sums of weights as whole multiples of a small step, so that neither order nor grouping matters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedhen.params import pack

STEPS = 2.0**36
"""Steps in 1.0: a weight is rounded once, by at most 2^-37, about 7e-12."""
LIMIT = 2.0**62
"""The sum over all devices stays below it, so that it cannot overflow."""


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

    def of(self, vector: Tensor) -> Tensor:
        """Returns packed weights as whole numbers of steps."""
        whole = vector.to(torch.float64, copy=True).mul_(self.steps).round_()
        # With one step for all weights, those furthest from zero can be found in the vector, which is half as large.
        low, high = whole.aminmax() if isinstance(self.steps, Tensor) else self._scale(vector.aminmax())
        if bool(torch.maximum(-low, high) > self.most):
            whole.clamp_(-self.most, self.most)
            if not self.warned:
                self.warned = True
                bound = f"{self.most / STEPS:,.0f}"
                warnings.warn(f"weights beyond ±{bound} are clipped to it in the all-devices average", stacklevel=2)
        return whole.long()

    def _scale(self, extremes: Sequence[Tensor]) -> list[Tensor]:
        return [extreme.double().mul_(self.steps).round_() for extreme in extremes]

    def mean(self, total: Tensor) -> Tensor:
        """Returns the mean over all devices of weights whose sum is `total`, in float64."""
        return total.double().div_(self.devices).div_(self.steps)
