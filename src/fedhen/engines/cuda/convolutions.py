"""Triton kernels for what torch computes slowly in convolutions: 3×3 weight gradients, and few input channels.

torch and cuDNN compute everything else. The kernels use channels last, and bf16 with sums in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional

from fedhen.engines.cuda.norms import sum_rows

PROGRAMS = 66
"""A weight gradient is split into about this many programs: half of the GPU, since several devices train at once."""
COLUMN = 32
"""The length of a row of the first layer's product, padded with zeros."""


@triton.jit
def _weight_gradient(
    dy, x, shares, pixels, CHUNK: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Σ over some pixels of dy[k] · x[c] shifted, for one row of the 3×3 kernel and some channels k and c."""
    tile, part = tl.program_id(0), tl.program_id(1)
    r = tile % 3
    k = tile // 3 % (K // BK) * BK + tl.arange(0, BK)
    c = tile // 3 // (K // BK) * BC + tl.arange(0, BC)
    left = tl.zeros([BK, BC], tl.float32)
    middle = tl.zeros([BK, BC], tl.float32)
    right = tl.zeros([BK, BC], tl.float32)
    for step in range(0, CHUNK, BP):
        p = part * CHUNK + step + tl.arange(0, BP)
        column, row = p % W, p // W % H + r - 1
        inside = (p < pixels) & (step + tl.arange(0, BP) < CHUNK)
        there = inside & (row >= 0) & (row < H)
        grad = tl.trans(tl.load(dy + p[:, None] * K + k[None, :], inside[:, None], 0.0))
        at = x + (p + (r - 1) * W)[:, None] * C + c[None, :]
        left = tl.dot(grad, tl.load(at - C, (there & (column > 0))[:, None], 0.0), left)
        middle = tl.dot(grad, tl.load(at, there[:, None], 0.0), middle)
        right = tl.dot(grad, tl.load(at + C, (there & (column < W - 1))[:, None], 0.0), right)
    out = shares + ((part * K + k)[:, None] * 9 + r * 3) * C + c[None, :]
    tl.store(out, left.to(shares.dtype.element_ty))
    tl.store(out + C, middle.to(shares.dtype.element_ty))
    tl.store(out + 2 * C, right.to(shares.dtype.element_ty))


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Computes the weight gradient of a 3×3 convolution with stride 1 and padding 1."""
    n, channels, height, width = x.shape
    kernels, pixels = dy.shape[1], n * height * width
    bk = min(kernels, 64)
    tiles = 3 * (kernels // bk) * (channels // 64)
    chunk = triton.cdiv(triton.cdiv(pixels, max(1, PROGRAMS // tiles)), 64) * 64
    parts = triton.cdiv(pixels, chunk)
    shares = x.new_empty((parts, kernels * 9 * channels), dtype=x.dtype if parts == 1 else torch.float32)
    _weight_gradient[(tiles, parts)](
        dy, x, shares, pixels, chunk, height, width, channels, kernels, 64, bk, 64, num_warps=4, num_stages=4
    )
    whole = shares if parts == 1 else sum_rows(shares, x.dtype)
    return whole.view(kernels, 3, 3, channels).permute(0, 3, 1, 2)


class _Conv3x3(Function):
    """A 3×3 convolution with stride 1 and padding 1, whose weight gradient uses our kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx, *_ = torch.ops.aten.convolution_backward(
            dy, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]
        )
        return dx, weight_gradient(dy, x)


def conv3x3(x: Tensor, weight: Tensor) -> Tensor:
    """A 3×3 convolution with stride 1 and padding 1."""
    kernels, channels = weight.shape[:2]
    low = x.is_cuda and x.dtype == weight.dtype == torch.bfloat16
    # Measured on an H200: 14, 16 and 12 µs instead of 21, 19 and 14 with 64, 128 and 512 channels; with 256 slower.
    if not low or kernels % 64 or channels % 64 or channels == 256 or not x.requires_grad:
        return functional.conv2d(x, weight, padding=1)
    x = x.contiguous(memory_format=torch.channels_last)
    y: Tensor = _Conv3x3.apply(x, weight)
    return y


@triton.jit
def _columns(x, out, size, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, B: tl.constexpr, COLUMN: tl.constexpr):
    """The 3×3 neighbourhoods of some pixels, each a row of COLUMN numbers: row, column, channel, then zeros."""
    p = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.arange(0, COLUMN)
    r, s, c = j // (3 * C) - 1, j // C % 3 - 1, j % C
    column, row = (p % W)[:, None] + s[None, :], (p // W % H)[:, None] + r[None, :]
    inside = (p < size)[:, None] & (j < 9 * C)[None, :] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    value = tl.load(x + (p[:, None] + r[None, :] * W + s[None, :]) * C + c[None, :], inside, 0.0)
    tl.store(out + p[:, None] * COLUMN + j[None, :], value.to(out.dtype.element_ty), (p < size)[:, None])


class _Stem(Function):
    """A 3×3 convolution of few channels, as a product of the pixels' neighbourhoods with the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        pixels, many = n * height * width, 9 * channels
        columns = weight.new_empty((pixels, COLUMN))
        _columns[(triton.cdiv(pixels, 64),)](x, columns, pixels, height, width, channels, 64, COLUMN)
        flat = functional.pad(weight.permute(0, 2, 3, 1).reshape(len(weight), many), (0, COLUMN - many))
        ctx.save_for_backward(columns)
        ctx.channels = channels
        return (columns @ flat.T).view(n, height, width, len(weight)).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (columns,) = ctx.saved_tensors
        kernels = dy.shape[1]
        whole = dy.permute(0, 2, 3, 1).reshape(-1, kernels).T @ columns
        return None, whole[:, : 9 * ctx.channels].view(kernels, 3, 3, ctx.channels).permute(0, 3, 1, 2)


def stem(x: Tensor, weight: Tensor) -> Tensor:
    """A 3×3 convolution with stride 1 and padding 1 for inputs that need no gradient."""
    low = x.is_cuda and x.dim() == 4 and weight.dtype == torch.bfloat16 and torch.is_autocast_enabled("cuda")
    if not low or x.requires_grad or 9 * x.shape[1] > COLUMN:
        return functional.conv2d(x, weight, padding=1)
    x = x.contiguous(memory_format=torch.channels_last)
    y: Tensor = _Stem.apply(x, weight)
    return y
