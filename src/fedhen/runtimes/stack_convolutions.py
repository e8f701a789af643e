"""Convolutions of several devices at once, in three forms: by pixel, by few products and by groups.

Activations are (batch, devices, channels, height, width), with the channels of a pixel side by side in memory: norms
over small images are then several times as fast, and the products need no transposition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BY_TAP = (0, 3, 4, 2, 1)
"""(devices, outputs, inputs, height, width) -> the order in which the products want a kernel."""
Convolution = Callable[..., Tensor]
"""(activations, kernels, biases) -> activations."""


def apart(x: Tensor, devices: int) -> Tensor:
    """(batch, devices · channels, ...) -> (batch, devices, channels, ...)."""
    return x.view(x.shape[0], devices, -1, *x.shape[2:])


def convolution(layer: nn.Conv2d) -> Convolution | None:
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


def products(layer: nn.Conv2d, shape: Sequence[int]) -> Convolution | None:
    """The convolution as matrix products with kernels in the order BY_TAP, where that is faster; else none.

    It is where a kernel is one pixel, and where an image has so few pixels that every output sees all of them.
    """
    size, padding, stride = layer.kernel_size, layer.padding, layer.stride
    if layer.padding_mode != "zeros" or layer.groups != 1 or layer.dilation != (1, 1) or isinstance(padding, str):
        return None
    if size == (1, 1) and padding == (0, 0):
        return lambda x, weight, bias=None: _plus(_by_pixel(x, weight, stride), bias)
    forms = [_form(*sides) for sides in zip(shape[2:], size, stride, padding, strict=True)]
    if None in forms:
        return None
    down, across = (form for form in forms if form is not None)
    both = down.times(across)
    return lambda x, weight, bias=None: _plus(_few(x, weight, both), bias)


@dataclass(frozen=True)
class _Form:
    """A convolution as outputs · ((taps · kernel) × (inputs · image)): the products between are few."""

    taps: Tensor
    inputs: Tensor
    outputs: Tensor
    sides: tuple[int, ...]
    """Of the image that comes out."""

    def times(self, other: _Form) -> _Form:
        """Both along one side each."""
        taps, inputs, outputs = (
            torch.kron(*pair)
            for pair in ((self.taps, other.taps), (self.inputs, other.inputs), (self.outputs, other.outputs))
        )
        return _Form(taps, inputs, outputs, self.sides + other.sides)

    def of(self, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The three matrices in numbers of a kind."""
        return self.taps.to(kind), self.inputs.to(kind), self.outputs.to(kind)


def _form(side: int, size: int, stride: int, padding: int) -> _Form | None:
    """Along one side of one or two pixels; none where some output does not see all of them.

    Two outputs of two inputs, y = a·u + b·v and z = c·u + a·v, are three products instead of four:
    s = a·(u + v), y = s + (b - a)·v and z = s + (c - a)·u.
    """
    outputs = (side + 2 * padding - size) // stride + 1
    met = [[i - o * stride + padding for i in range(side)] for o in range(outputs)]
    if side > 2 or not all(0 <= tap < size for row in met for tap in row):
        return None
    tap, one = torch.eye(size), torch.eye(side)
    if outputs == 1:
        return _Form(tap[met[0]], one, torch.ones(1, side), (1,))
    if outputs != 2 or side != 2 or stride != 1:
        return None
    (a, b), (c, _) = met
    taps = torch.stack([tap[a], tap[b] - tap[a], tap[c] - tap[a]])
    return _Form(taps, torch.tensor([[1.0, 1], [0, 1], [1, 0]]), torch.tensor([[1.0, 1, 0], [1, 0, 1]]), (2,))


def _few(x: Tensor, weight: Tensor, form: _Form) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        # The sums before and after the products are not for short numbers.
        with torch.autocast("cpu", enabled=False):
            return _few(x.to(weight.dtype), weight, form)
    batch, devices, channels = x.shape[:3]
    taps, inputs, outputs = form.of(weight.dtype)
    kernels = (taps @ weight.flatten(3).flatten(1, 2)).view(-1, channels, weight.shape[-1])
    pixels = (inputs @ _by_device(x)).view(len(kernels), batch, channels)
    return _by_image(outputs @ torch.bmm(pixels, kernels).view(devices, len(taps), -1), form.sides, batch)


def _by_device(x: Tensor) -> Tensor:
    """(batch, devices, channels, height, width) -> (devices, pixels, batch · channels)."""
    return x.permute(1, 3, 4, 0, 2).flatten(3).flatten(1, 2)


def _by_image(x: Tensor, sides: Sequence[int], batch: int) -> Tensor:
    """The other way, with the channels of a pixel side by side."""
    pixels = x.view(len(x), *sides, batch, -1).permute(3, 1, 2, 0, 4)
    return pixels.contiguous().permute(0, 3, 4, 1, 2)


def _by_pixel(x: Tensor, weight: Tensor, stride: tuple[int, ...]) -> Tensor:
    x = x[..., :: stride[0], :: stride[1]]
    batch, devices, channels, height, width = x.shape
    pixels = x.permute(1, 0, 3, 4, 2).reshape(devices, -1, channels)
    out = torch.bmm(pixels, weight.flatten(1, 3))
    return out.view(devices, batch, height, width, -1).permute(1, 0, 4, 2, 3)


def _plus(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias[..., None, None]
