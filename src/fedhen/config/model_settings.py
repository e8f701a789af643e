"""The settings of the model family, and of objectives that are a sum over exits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedhen.config.setting import setting


@dataclass(frozen=True)
class ModelConfig:
    """The model family. Input channels, input size, context and classes follow from the data."""

    family: str = setting(
        "preact-resnet",
        "model family: preact-resnet for images, gpt for text; 'python' or file.py:NAME if it is your own",
    )
    initial: str = setting(
        "",
        "a safetensors file with weights to start from, all or some; 'python' if they were passed from Python; "
        "empty: as the models are built",
    )
    widths: tuple[int, ...] = setting((64, 128, 256, 512), "channels of each stage")
    blocks: tuple[int, ...] = setting((2, 2, 2, 2), "residual blocks of each stage")
    strides: tuple[int, ...] = setting((1, 2, 2, 2), "stride of each stage")
    nesting: Literal["depth", "width", "both"] = setting(
        "depth", "depth: a tier ends after its stage; width: it has a share of every layer's channels; both: both"
    )
    exits: dict[str, int] = setting(
        {"simple": 2, "complex": 4}, "the stage after which each tier ends, shallowest first; of gpt the block"
    )
    rates: dict[str, float] = setting(
        {"simple": 0.25, "complex": 1.0}, "each tier's share of the channels, with nesting by width"
    )
    scaler: bool = setting(False, "with nesting by width, divide by the rate before each norm in training (HeteroFL)")
    groups: int = setting(
        2, "groups of GroupNorm; for a narrow layer their greatest common divisor with its width", least=1
    )
    exit_pool: int = setting(4, "an early exit pools to this height and width; 1 is global", least=1)
    exit_mix: float | Literal["uniform"] = setting(
        "uniform", "initial share of max pooling in an early exit; uniform: drawn from [0, 1)"
    )
    final_norm: bool = setting(False, "a norm and a ReLU before the last average pool")
    width: int = setting(64, "gpt: numbers in the hidden state of a token", least=1)
    heads: int = setting(4, "gpt: heads of the attention; they share the width", least=1)


@dataclass(frozen=True)
class ObjectiveConfig:
    """Options of an objective that is a sum over exits."""

    exit_weights: dict[str, float] = setting(
        {}, "weight of each nested exit in the loss, by default 1; 0 leaves it out; a model's own exit has weight 1"
    )
    distillation: float = setting(
        0.0, "weight of self-distillation: exits learn from each other's softened outputs (DepthFL)", least=0
    )
    temperature: float = setting(1.0, "temperature that softens these outputs", above=0)
