"""Heads for tiers that are cut from one model: each turns the hidden state after a block into outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from fedhen.errors import ConfigError, unknown_name
from fedhen.models.pooling import MixPool

PAPERS_POOL = 4
"""The paper's early exits pool to 4 × 4."""

Head = str | nn.Module | Callable[[Tensor], nn.Module]


class AveragePool(nn.Module):
    """The average over the whole image."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean((2, 3))


class FirstToken(nn.Module):
    """The first position of a sequence."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, 0]


class MeanHead(nn.Module):
    """A linear layer on the mean over the positions that the attention mask keeps, or over all."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        # A mask of another shape, like one for each query and key, does not say which positions are padding.
        if mask is None or mask.shape != hidden.shape[:2]:
            mean = hidden.mean(1)
        else:
            kept = mask.to(hidden.dtype)[:, :, None]
            mean = (hidden * kept).sum(1) / kept.sum(1).clamp(min=1)
        logits: Tensor = self.linear(mean)
        return logits


class TiedHead(nn.Module):
    """A norm, then the similarity to every row of an embedding that belongs to the model and not to the head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(self.norm(hidden), embedding)


def _pool(hidden: Tensor, outputs: int) -> nn.Module:
    return nn.Sequential(AveragePool(), nn.Linear(hidden.shape[1], outputs))


def _mix(hidden: Tensor, outputs: int) -> nn.Module:
    channels, height, width = hidden.shape[1:]
    if height != width:
        raise ConfigError(f"the head 'mix' needs square images, found {height}×{width} after the block: use 'pool'")
    side = math.gcd(height, PAPERS_POOL)
    return nn.Sequential(MixPool(height, side, "uniform"), nn.Flatten(), nn.Linear(channels * side**2, outputs))


def _first(hidden: Tensor, outputs: int) -> nn.Module:
    return nn.Sequential(FirstToken(), nn.Linear(hidden.shape[-1], outputs))


def _mean(hidden: Tensor, outputs: int) -> nn.Module:
    return MeanHead(hidden.shape[-1], outputs)


def _linear(hidden: Tensor, outputs: int) -> nn.Module:
    linear = nn.Linear(width := hidden.shape[-1], outputs)
    # Between a decoder's blocks the hidden states have no norm: decoders put one before their last layer.
    return linear if hidden.dim() == 2 else nn.Sequential(nn.LayerNorm(width), linear)


def _tied(hidden: Tensor, outputs: int) -> nn.Module:
    return TiedHead(hidden.shape[-1])


HEADS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, int], nn.Module]]] = {
    "pool": ((4,), _pool),
    "mix": ((4,), _mix),
    "first": ((3,), _first),
    "mean": ((3,), _mean),
    "linear": ((2, 3), _linear),
    "tied": ((3,), _tied),
}
"""Name -> the numbers of dimensions of the hidden states that the head can read, and how it is made for one of them."""
BY_DIMENSIONS = {2: "linear", 3: "mean", 4: "pool"}
SHAPES = {2: "(batch, features)", 3: "(batch, positions, features)", 4: "(batch, channels, height, width)"}


def choose_head(tier: str, hidden: Tensor) -> str:
    """Returns the name of the default head for a hidden state."""
    if hidden.dim() not in BY_DIMENSIONS:
        raise ConfigError(f"tier {tier!r}: no head is made for a hidden state of shape {tuple(hidden.shape)}: pass one")
    return BY_DIMENSIONS[hidden.dim()]


def check_head(tier: str, name: str, hidden: Tensor) -> None:
    """Raises a FedhenError if the name is not known or its head cannot read the hidden state."""
    if name not in HEADS:
        raise unknown_name(f"head of tier {tier!r}", name, HEADS)
    if hidden.dim() not in (fits := HEADS[name][0]):
        shapes = " or ".join(SHAPES[number] for number in fits)
        raise ConfigError(
            f"tier {tier!r}: the head {name!r} reads hidden states of shape {shapes}, "
            f"and the block returns {tuple(hidden.shape)}"
        )


def make_head(tier: str, head: Head, hidden: Tensor, outputs: int | None) -> nn.Module:
    """Makes a head for a hidden state: a named one has weights that are drawn now, a given module is copied."""
    if isinstance(head, str):
        assert outputs is not None
        return HEADS[head][1](hidden, outputs).to(hidden)
    made = copy.deepcopy(head) if isinstance(head, nn.Module) else head(hidden)
    if not isinstance(made, nn.Module):
        raise ConfigError(f"tier {tier!r}: the head's function must return a module, it returned {type(made).__name__}")
    return made
