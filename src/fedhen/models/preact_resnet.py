"""PreActResNet with GroupNorm and early exits: the paper's models, at any width, depth and input size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedhen.errors import ConfigError
from fedhen.hardware.memory import free_memory
from fedhen.models.family import Family
from fedhen.models.lazy_exits import LazyExits
from fedhen.models.pooling import MixPool
from fedhen.params import take_corner

MOST_BLOCKS = 1000
"""Deeper networks do not train, and building them takes minutes."""


@dataclass(frozen=True)
class Size:
    """The part of the network that a tier has: its first stages, with a share of the channels."""

    stages: int
    rate: float

    def fits(self, other: Size) -> bool:
        """Returns whether a network of this size is part of one of the other."""
        return self.stages <= other.stages and self.rate <= other.rate


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
    nesting: str = "depth"
    rates: Mapping[str, float] = field(default_factory=dict)
    """Tier -> its share of the channels, unless nesting is by depth."""
    scaler: bool = False

    def __post_init__(self) -> None:
        stages = len(self.widths)
        if not stages or len(self.blocks) != stages or len(self.strides) != stages:
            raise ConfigError("model.widths, model.blocks and model.strides must each have one value per stage")
        if min(self.widths + self.blocks + self.strides + (self.groups, self.exit_pool)) < 1:
            raise ConfigError("model.widths, blocks, strides, groups and exit_pool must be at least 1")
        self._check_size()
        if self.nesting != "width":
            self._check_exits(stages)
        for tier, rate in self.rates.items():
            if not 0 < rate <= 1:
                raise ConfigError(
                    f"model.rates.{tier} = {rate:g}: a tier's share of the channels must be above 0 and at most 1"
                )
        if self.nesting == "width" and list(self.rates.values()) != sorted(set(self.rates.values())):
            raise ConfigError("model.rates must rise from tier to tier, the smallest first")

    def _check_size(self) -> None:
        """Refuses a network that does not fit the memory, by its 3×3 kernels and linear layers."""
        if sum(self.blocks) > MOST_BLOCKS:
            raise ConfigError(f"model.blocks add up to {sum(self.blocks)}: at most {MOST_BLOCKS} are allowed")
        kernels = sum(
            9 * w * (i + (2 * b - 1) * w)
            for i, w, b in zip((0, *self.widths[:-1]), self.widths, self.blocks, strict=True)
        )
        linears = max(self.widths) * self.classes * min(self.exit_pool, self.size) ** 2
        if 4 * (kernels + linears) > free_memory(torch.device("cpu")):
            size = f"{(kernels + linears) / 1e9:.1f} billion weights"
            raise ConfigError(f"a model of {size} does not fit in memory: lower model.widths")

    def _check_exits(self, stages: int) -> None:
        ends = list(self.exits.values())
        if not ends or min(ends) < 1 or max(ends) != stages:
            raise ConfigError(f"model.exits must name stages from 1 to {stages}, and the last stage among them")
        if self.nesting == "depth" and ends != sorted(set(ends)):
            raise ConfigError("model.exits must name stages in rising order, shallowest tier first")
        for stage in {*ends} - {stages}:
            if (side := self.size_after(stage)) % self.exit_pool:
                where = f"stage {stage}'s {side}×{side} output"
                raise ConfigError(f"model.exit_pool={self.exit_pool} does not divide {where}: 1 always does")

    def tiers(self) -> dict[str, Size]:
        """Returns each tier's size, shallowest first."""
        names, stages = {"depth": self.exits, "width": self.rates, "both": self.exits}[self.nesting], len(self.widths)
        if self.nesting == "both" and self.exits.keys() != self.rates.keys():
            raise ConfigError("model.exits and model.rates must name the same tiers if model.nesting is both")
        return {
            tier: Size(
                stages if self.nesting == "width" else self.exits[tier],
                1.0 if self.nesting == "depth" else self.rates[tier],
            )
            for tier in names
        }

    def width(self, stage: int, rate: float) -> int:
        """Returns the channels of a stage at that rate: HeteroFL's ceil(r·w)."""
        return math.ceil(rate * self.widths[stage - 1])

    def size_after(self, stage: int) -> int:
        """Returns height and width after that many stages; a 3×3 convolution with padding 1 rounds up."""
        size = self.size
        for stride in self.strides[:stage]:
            size = -(-size // stride)
        return size


def preact_resnet(shape: Shape) -> Family:
    """Makes a family with the tiers of `shape.tiers()`: each its stages and channels, its exit and the nested tiers."""
    sizes = shape.tiers()
    nested = {
        tier: (*(t for t in sizes if sizes[t] != size and sizes[t].fits(size)), tier) for tier, size in sizes.items()
    }
    stages, rates = (max(getattr(size, name) for size in sizes.values()) for name in ("stages", "rate"))
    everything = partial(PreActResNet, shape, Size(stages, rates), tuple(sizes.values()))
    builds = {tier: partial(Nested, shape, size, tuple(sizes[t] for t in nested[tier])) for tier, size in sizes.items()}
    linears = [name for name, module in everything().named_modules() if isinstance(module, nn.Linear)]
    outputs = frozenset(f"{name}.{weight}" for name in linears for weight in ("weight", "bias"))
    return Family(builds, nested=nested, supernet=everything, outputs=outputs)


class PreActResNet(nn.Module):
    """The first stages, with a share of the channels, and the exits that networks of these sizes need.

    It returns the logits of the exits that have its number of channels, shallowest first.
    """

    def __init__(self, shape: Shape, size: Size, exits: Sequence[Size]) -> None:
        super().__init__()
        widths = [shape.width(k, size.rate) for k in range(1, size.stages + 1)]
        self.stem = nn.Conv2d(shape.channels, widths[0], 3, padding=1, bias=False)
        scale = size.rate if shape.scaler else 1.0
        self.stages = nn.ModuleList(
            _stage(shape, k, (i, o), scale) for k, (i, o) in enumerate(zip([widths[0], *widths], widths, strict=False))
        )
        # Keyed by stage, so that an exit has the same name in all tiers; as wide as the widest network that ends there.
        rates = {k: max(s.rate for s in exits if s.stages == k) for k in sorted({s.stages for s in exits})}
        self.exits = nn.ModuleDict({str(k): _exit(shape, k, rate) for k, rate in rates.items()})
        self.read = tuple(k for k, rate in rates.items() if rate == size.rate)

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        x, logits = self.stem(x), []
        for k, stage in enumerate(self.stages, start=1):
            x = stage(x)
            if k in self.read:
                logits.append(self.exits[str(k)](x))
        return logits


class Nested(PreActResNet):
    """A tier's network. It returns the logits of every tier nested in it, its own last.

    Tiers with the same number of channels are exits of one pass. A tier with fewer channels takes a separate pass over
    the leading corners of the weights, made when its logits are read.
    """

    def __init__(self, shape: Shape, size: Size, nested: Sequence[Size]) -> None:
        super().__init__(shape, size, nested)
        self.size, self.nested = size, tuple(nested)
        # Shells without weights; in a dict, so that torch does not take them for sub-modules.
        with torch.device("meta"):
            self.shells = {
                s: PreActResNet(shape, s, [t for t in nested if t.fits(s)]) for s in nested if s.rate != size.rate
            }

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        own = dict(zip(self.read, super().forward(x), strict=True))
        if not self.shells:
            return list(own.values())
        return LazyExits([partial(self._logits, own, x, size) for size in self.nested])

    def _logits(self, own: Mapping[int, Tensor], x: Tensor, size: Size) -> Tensor:
        if size not in self.shells:
            return own[size.stages]
        shell = self.shells[size].train(self.training)
        weights = {name: take_corner(self.get_parameter(name), p.shape) for name, p in shell.named_parameters()}
        logits: Tensor = functional_call(shell, weights, (x,))[-1]
        return logits


class Block(nn.Module):
    """A pre-activation basic block. A shortcut that changes the shape is a 1×1 convolution of the activated input."""

    def __init__(self, width_in: int, width: int, stride: int, groups: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.norm1 = group_norm(groups, width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = group_norm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        changes = stride != 1 or width_in != width
        self.shortcut = nn.Conv2d(width_in, width, 1, stride=stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(scale_channels(x, self.scale, self.training)))
        kept = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = self.conv2(F.relu(self.norm2(scale_channels(self.conv1(active), self.scale, self.training))))
        return out + kept


def scale_channels(x: Tensor, scale: float, training: bool) -> Tensor:
    """HeteroFL's scaler: divides by the share of the channels in training."""
    return x / scale if training and scale != 1 else x


class GlobalPool(nn.Module):
    """The average over the whole image, after a last norm if there is one."""

    def __init__(self, norm: nn.Module | None, scale: float) -> None:
        super().__init__()
        self.norm, self.scale = norm, scale

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            x = F.relu(self.norm(scale_channels(x, self.scale, self.training)))
        return x.mean((2, 3))


def group_norm(groups: int, width: int) -> nn.GroupNorm:
    """Returns a GroupNorm with the greatest common divisor of `groups` and the width as its groups."""
    return nn.GroupNorm(math.gcd(groups, width), width)


def _stage(shape: Shape, k: int, widths: tuple[int, int], scale: float) -> nn.Sequential:
    width_in, width = widths
    strides = [shape.strides[k]] + [1] * (shape.blocks[k] - 1)
    inputs = [width_in] + [width] * (shape.blocks[k] - 1)
    return nn.Sequential(*(Block(i, width, s, shape.groups, scale) for i, s in zip(inputs, strides, strict=True)))


def _exit(shape: Shape, stage: int, rate: float) -> nn.Sequential:
    width, size = shape.width(stage, rate), shape.size_after(stage)
    if stage == len(shape.widths):
        pool: nn.Module = GlobalPool(
            group_norm(shape.groups, width) if shape.final_norm else None, rate if shape.scaler else 1.0
        )
        return nn.Sequential(pool, nn.Linear(width, shape.classes))
    pool = MixPool(size, shape.exit_pool, shape.exit_mix)
    return nn.Sequential(pool, nn.Flatten(), nn.Linear(width * shape.exit_pool**2, shape.classes))
