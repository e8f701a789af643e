"""Layers of several devices as one operation; activations are (batch, devices, ...), weights (devices, ...)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhen.runtimes.stack_convolutions import apart, convolution

Rule = Callable[..., Any]
"""(activations, weights...) of all devices -> activations of all devices."""


def linear(layer: nn.Linear) -> Rule:
    """One matrix product a device, all in one call."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        first, across = x.transpose(0, 1), weight.transpose(1, 2)
        out = torch.bmm(first, across) if bias is None else torch.baddbmm(bias[:, None], first, across)
        return out.transpose(0, 1)

    return run


def group_norm(layer: nn.GroupNorm) -> Rule:
    """The devices' groups of channels are the groups of one norm."""

    def run(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        scale, shift = (None if t is None else t.flatten() for t in (weight, bias))
        groups = x.shape[1] * layer.num_groups
        return apart(F.group_norm(x.flatten(1, 2), groups, scale, shift, layer.eps), x.shape[1])

    return run


def embedding(layer: nn.Embedding) -> Rule:
    """The devices' tables below each other; a row that is not in a device's own must not be found in the next one's."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        devices, rows = weight.shape[:2]
        if bool(((x < 0) | (x >= rows)).any()):
            raise IndexError("index out of range in self")
        first = torch.arange(0, devices * rows, rows, device=x.device).view(1, devices, *[1] * (x.dim() - 2))
        return F.embedding(x + first, weight.flatten(0, 1))

    return run


def per_channel(pool: Callable[..., Any]) -> Rule:
    """An operation on each channel of an image for itself: the devices' channels are just more of them."""
    return lambda x, *args, **settings: apart(pool(x.flatten(1, 2), *args, **settings), x.shape[1])


def with_weights(call: Rule, missing: Sequence[int]) -> Rule:
    """An elementwise operation on activations and on weights that lack this many of their dimensions."""

    def lined_up(value: Tensor, ones: int) -> Tensor:
        return value.view(value.shape[0], *[1] * ones, *value.shape[1:]) if ones else value

    return lambda *values: call(*map(lined_up, values, missing))


def layer_rule(layer: nn.Module, shape: Sequence[int]) -> Rule | None:
    """The rule for a layer whose input has this shape on one device; none where it has no rule."""
    rank = len(shape)
    if isinstance(layer, ELEMENTWISE_LAYERS):
        return layer
    if type(layer) is nn.Conv2d and rank == 4:
        return convolution(layer)
    if type(layer) is nn.Linear and rank == 2:
        return linear(layer)
    if type(layer) is nn.GroupNorm and rank > 1:
        return group_norm(layer)
    if type(layer) is nn.Embedding and layer.padding_idx is None and layer.max_norm is None:
        return embedding(layer)
    if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return lambda x: x.flatten(2)
    if type(layer) in (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d) and rank == 4:
        return per_channel(layer)
    return None


def mean(*dims: Any, **settings: Any) -> Rule | None:
    """Over some dimensions of a device's activations, given as `Tensor.mean` takes them; none if one is the batch."""
    over = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    if not over or not all(isinstance(dim, int) and dim > 0 for dim in over):
        return None
    return lambda x: x.mean([dim + 1 for dim in over], **settings)


PER_CHANNEL: Mapping[Any, Rule] = {
    pool: per_channel(pool) for pool in (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d)
}
"""Functions of images."""

ELEMENTWISE_LAYERS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Identity)

ELEMENTWISE = {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.relu, torch.tanh, torch.sigmoid, torch.exp, torch.log),
    *(F.relu, F.tanh, F.sigmoid, F.gelu, F.silu, F.leaky_relu, F.elu),
}
"""Functions that may also mix activations and weights."""
