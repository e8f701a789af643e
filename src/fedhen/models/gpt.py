"""A GPT with early exits: a decoder that predicts the next token at every position, nested by depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhen.errors import ConfigError
from fedhen.hardware.memory import free_memory
from fedhen.models.family import Family

MOST_BLOCKS = 1000
"""Deeper networks do not train, and building them takes minutes."""


@dataclass(frozen=True)
class GPTShape:
    """The architecture."""

    vocabulary: int
    context: int
    """Tokens in an input."""
    width: int = 64
    heads: int = 4
    exits: Mapping[str, int] = field(default_factory=lambda: {"simple": 1, "complex": 3})
    """Tier -> the block after which it ends, shallowest first."""

    def __post_init__(self) -> None:
        ends = list(self.exits.values())
        if not ends or min(ends) < 1 or ends != sorted(set(ends)):
            raise ConfigError("model.exits must name blocks from 1 on in rising order, shallowest tier first")
        if max(ends) > MOST_BLOCKS:
            raise ConfigError(f"model.exits asks for {max(ends)} blocks: at most {MOST_BLOCKS} are allowed")
        if self.width < 1 or self.heads < 1 or self.width % self.heads:
            raise ConfigError(
                f"model.width={self.width} must be a multiple of model.heads={self.heads}: every head of the attention "
                "has the same share"
            )
        # A block's products have 12·width² weights.
        weights = 12 * self.width**2 * max(ends) + self.width * (self.context + self.vocabulary * (1 + len(ends)))
        if 4 * weights > free_memory(torch.device("cpu")):
            raise ConfigError(
                f"a model of {weights / 1e9:.1f} billion weights does not fit in memory: lower model.width"
            )


def gpt(shape: GPTShape) -> Family:
    """Makes a family with the tiers of `shape.exits`: each has its blocks, its exit and those of the nested tiers."""
    ends = list(shape.exits.values())
    builds = {tier: partial(GPT, shape, tuple(ends[: k + 1])) for k, tier in enumerate(shape.exits)}
    outputs = frozenset(f"exits.{end}.1.{weight}" for end in ends for weight in ("weight", "bias"))
    return Family(builds, outputs=outputs)


class GPT(nn.Module):
    """The first blocks of a decoder, with an exit after each of `ends`.

    It takes token ids (batch, context) and returns the logits (batch, context, vocabulary) of its exits, shallowest
    first. An exit is a norm and a linear layer of its own, because hidden states have no norm between the blocks.

    Weights are drawn as torch draws them. GPT-2's draw (a standard deviation of 0.02) was ahead for 200 steps of Adam
    and then behind: after 600, of batches of 8 windows of Shakespeare at width 64, the third block's exit had 2.32 and
    2.33 nats on held-out text with seeds 1 and 2, and 2.28 with torch's draw and either seed.
    """

    def __init__(self, shape: GPTShape, ends: tuple[int, ...]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(GPTBlock(shape.width, shape.heads) for _ in range(ends[-1]))
        # Keyed by block, so that an exit has the same name in all tiers.
        self.exits = nn.ModuleDict(
            {
                str(end): nn.Sequential(nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary))
                for end in ends
            }
        )

    def forward(self, tokens: Tensor) -> list[Tensor]:
        x, logits = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]], []
        for k, block in enumerate(self.blocks, start=1):
            x = block(x)
            if str(k) in self.exits:
                logits.append(self.exits[str(k)](x))
        return logits


class GPTBlock(nn.Module):
    """Causal self-attention, then a perceptron four times as wide; each reads a norm of its input and adds to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        query, key, value = self.attend(self.norm1(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, context, width))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.norm2(x))))
        return out
