"""Mix pooling, the layer of the paper's early exits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MixPool(nn.Module):
    """α·max + (1 − α)·average over windows, with one learned, unbounded α (Lee et al. 2016, Kaya et al. 2019)."""

    def __init__(self, size: int, outputs: int, mix: float | str) -> None:
        super().__init__()
        self.kernel = size // outputs
        self.alpha = nn.Parameter(torch.rand(()) if mix == "uniform" else torch.tensor(float(mix)))

    def forward(self, x: Tensor) -> Tensor:
        """Pools to outputs × outputs."""
        return mix_pool2d(x, self.alpha, self.kernel)


def mix_pool2d(x: Tensor, alpha: Tensor, kernel: int) -> Tensor:
    """Returns α·max + (1 − α)·average over windows of kernel × kernel."""
    # The stride is named too: exporters of other runtimes do not know that it is the kernel's by default.
    return alpha * F.max_pool2d(x, kernel, kernel) + (1 - alpha) * F.avg_pool2d(x, kernel, kernel)
