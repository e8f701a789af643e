"""Convolutions of several devices at once, in three forms: by pixel, by matrix and by groups.

Activations are (batch, devices, channels, height, width), with the channels of a pixel side by side in memory: norms
over small images are then several times as fast, and the products need no transposition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KEPT = (0, 3, 4, 2, 1)
"""(devices, outputs, inputs, height, width) -> the order in which the products want a kernel."""


def apart(x: Tensor, devices: int) -> Tensor:
    """(batch, devices · channels, ...) -> (batch, devices, channels, ...)."""
    return x.view(x.shape[0], devices, -1, *x.shape[2:])


def convolution(layer: nn.Conv2d) -> Callable[..., Tensor] | None:
    """The devices' convolutions are the groups of one; none where the padding is not with zeros."""
    if layer.padding_mode != "zeros":
        return None

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        devices = x.shape[1]
        flat = x.flatten(1, 2).contiguous(memory_format=torch.channels_last)
        biases, groups = None if bias is None else bias.flatten(), devices * layer.groups
        sizes = layer.stride, layer.padding, layer.dilation
        out = F.conv2d(flat, weight.flatten(0, 1), biases, *sizes, groups)  # type: ignore[arg-type]
        return apart(out, devices)

    return run


def product(layer: nn.Conv2d, shape: Sequence[int]) -> Callable[..., Tensor] | None:
    """The convolution as matrix products with kernels in the order KEPT, where that is faster; else none.

    It is where a kernel is one pixel, and where an image is so small that every pixel of the output sees every pixel of
    the input: then there are fewer products than with padding, 16 instead of 36 for 2×2 pixels and a 3×3 kernel.
    """
    size, padding, stride = layer.kernel_size, layer.padding, layer.stride
    if layer.padding_mode != "zeros" or layer.groups != 1 or layer.dilation != (1, 1) or isinstance(padding, str):
        return None
    if size == (1, 1) and padding == (0, 0):
        return lambda x, weight, bias=None: _plus(_by_pixel(x, weight, stride), bias)
    taps = [_taps(*sides) for sides in zip(shape[2:], size, stride, padding, strict=True)]
    if not all(0 <= tap < side for rows, side in zip(taps, size, strict=True) for row in rows for tap in row):
        return None
    rows, columns = taps
    index = torch.tensor([r * size[1] + c for row in rows for column in columns for r in row for c in column])
    return lambda x, weight, bias=None: _plus(_by_matrix(x, weight, index, (len(rows), len(columns))), bias)


def _taps(side: int, size: int, stride: int, padding: int) -> list[list[int]]:
    """For each output along a side, which tap of the kernel meets each input."""
    outputs = (side + 2 * padding - size) // stride + 1
    return [[i - o * stride + padding for i in range(side)] for o in range(outputs)]


def _by_pixel(x: Tensor, weight: Tensor, stride: tuple[int, ...]) -> Tensor:
    x = x[..., :: stride[0], :: stride[1]]
    batch, devices, channels, height, width = x.shape
    pixels = x.permute(1, 0, 3, 4, 2).reshape(devices, -1, channels)
    out = torch.bmm(pixels, weight.flatten(1, 3))
    return out.view(devices, batch, height, width, -1).permute(1, 0, 4, 2, 3)


def _by_matrix(x: Tensor, weight: Tensor, index: Tensor, sides: tuple[int, int]) -> Tensor:
    """One product for each device and output pixel: all input pixels by the taps that they meet."""
    (batch, devices), outputs = x.shape[:2], weight.shape[-1]
    images = x.permute(1, 0, 3, 4, 2).reshape(devices, 1, batch, -1)
    repeated = images.expand(-1, sides[0] * sides[1], -1, -1).flatten(0, 1)
    met = weight.flatten(3).flatten(1, 2).index_select(1, index).view(len(repeated), -1, outputs)
    out = torch.bmm(repeated, met).view(devices, -1, batch, outputs)
    return out.permute(2, 1, 0, 3).reshape(batch, *sides, devices, outputs).permute(0, 3, 4, 1, 2)


def _plus(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias[..., None, None]
