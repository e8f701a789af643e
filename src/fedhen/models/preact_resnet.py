"""PreActResNet with GroupNorm and early exits: the paper's models, at any width, depth and input size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhen.errors import UserError
from fedhen.models.nesting import Family


@dataclass(frozen=True)
class Shape:
    """The architecture; by default PreActResNet18 for 32×32 images in 10 classes, with the paper's two tiers."""

    channels: int = 3
    size: int = 32
    classes: int = 10
    widths: tuple[int, ...] = (64, 128, 256, 512)
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    strides: tuple[int, ...] = (1, 2, 2, 2)
    exits: Mapping[str, int] = field(default_factory=lambda: {"simple": 2, "complex": 4})
    """Tier -> the stage after which it ends, shallowest first."""
    groups: int = 2
    exit_pool: int = 4
    exit_mix: float | str = "uniform"
    final_norm: bool = False

    def __post_init__(self) -> None:
        stages = len(self.widths)
        if not stages or len(self.blocks) != stages or len(self.strides) != stages:
            raise UserError("model.widths, model.blocks and model.strides must have one value a stage each")
        if min(self.widths + self.blocks + self.strides + (self.groups, self.exit_pool)) < 1:
            raise UserError("model.widths, blocks, strides, groups and exit_pool must be at least 1")
        ends = list(self.exits.values())
        if ends != sorted(set(ends)) or ends[-1:] != [stages] or ends[0] < 1:
            raise UserError(f"model.exits must name stages in rising order and end with {stages}, the last stage")
        for stage in ends[:-1]:
            if (side := self.size_after(stage)) % self.exit_pool:
                where = f"stage {stage}'s {side}×{side} output"
                raise UserError(f"model.exit_pool={self.exit_pool} does not divide {where}: 1 always does")

    def size_after(self, stage: int) -> int:
        """Height and width after that many stages: a 3×3 convolution with padding 1 rounds up."""
        size = self.size
        for stride in self.strides[:stage]:
            size = -(-size // stride)
        return size


def preact_resnet(shape: Shape) -> Family:
    """A tier for each of `shape.exits`: its stages, its own exit, and inside it the exits of the tiers before it."""
    return Family({tier: partial(PreActResNet, shape, stages) for tier, stages in shape.exits.items()})


class PreActResNet(nn.Module):
    """The first `stages` stages, with every exit up to there; returns the logits of all exits, shallowest first."""

    def __init__(self, shape: Shape, stages: int) -> None:
        super().__init__()
        widths = (shape.widths[0], *shape.widths[:stages])
        self.stem = nn.Conv2d(shape.channels, widths[0], 3, padding=1, bias=False)
        self.stages = nn.ModuleList(_stage(shape, k, widths[k], widths[k + 1]) for k in range(stages))
        # Keyed by stage, so that an exit has the same name in every tier.
        self.exits = nn.ModuleDict({str(k): _exit(shape, k) for k in shape.exits.values() if k <= stages})

    def forward(self, x: Tensor) -> list[Tensor]:
        """The logits of every exit, shallowest first."""
        x, logits = self.stem(x), []
        for k, stage in enumerate(self.stages, start=1):
            x = stage(x)
            if str(k) in self.exits:
                logits.append(self.exits[str(k)](x))
        return logits


class Block(nn.Module):
    """A pre-activation basic block; a shortcut that changes the shape is a 1×1 convolution of the activated input."""

    def __init__(self, width_in: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1 = group_norm(groups, width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = group_norm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        changes = stride != 1 or width_in != width
        self.shortcut = nn.Conv2d(width_in, width, 1, stride=stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """x, or its shortcut, plus two convolutions of normalised activations."""
        active = F.relu(self.norm1(x))
        kept = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return out + kept


class MixPool(nn.Module):
    """α·max + (1 − α)·average over windows, with one learned α, not squashed (Lee et al. 2016, Kaya et al. 2019)."""

    def __init__(self, size: int, outputs: int, mix: float | str) -> None:
        super().__init__()
        self.kernel = size // outputs
        self.alpha = nn.Parameter(torch.rand(()) if mix == "uniform" else torch.tensor(float(mix)))

    def forward(self, x: Tensor) -> Tensor:
        """Pool to outputs × outputs."""
        return self.alpha * F.max_pool2d(x, self.kernel) + (1 - self.alpha) * F.avg_pool2d(x, self.kernel)


class GlobalPool(nn.Module):
    """The average over the whole image, after a last norm if there is one."""

    def __init__(self, norm: nn.Module | None) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Pool to 1×1."""
        return (x if self.norm is None else F.relu(self.norm(x))).mean((2, 3))


def group_norm(groups: int, width: int) -> nn.GroupNorm:
    """GroupNorm with that many groups, or with the largest number of them that divides a narrow layer."""
    return nn.GroupNorm(math.gcd(groups, width), width)


def _stage(shape: Shape, k: int, width_in: int, width: int) -> nn.Sequential:
    strides = [shape.strides[k]] + [1] * (shape.blocks[k] - 1)
    inputs = [width_in] + [width] * (shape.blocks[k] - 1)
    return nn.Sequential(*(Block(i, width, s, shape.groups) for i, s in zip(inputs, strides, strict=True)))


def _exit(shape: Shape, stage: int) -> nn.Sequential:
    width, size = shape.widths[stage - 1], shape.size_after(stage)
    if stage == len(shape.widths):
        pool: nn.Module = GlobalPool(group_norm(shape.groups, width) if shape.final_norm else None)
        return nn.Sequential(pool, nn.Linear(width, shape.classes))
    pool = MixPool(size, shape.exit_pool, shape.exit_mix)
    return nn.Sequential(pool, nn.Flatten(), nn.Linear(width * shape.exit_pool**2, shape.classes))
