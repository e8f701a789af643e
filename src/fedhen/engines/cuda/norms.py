"""Triton kernels for GroupNorm with the ReLU after it and the sum before it: one pass forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

LARGEST_GROUP = 32768
"""The most elements of one image and group that a program can hold. torch computes larger groups."""


@triton.jit
def _norm_relu(
    x, other, weight, bias, total, y, mean, rstd, eps, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """y = relu(norm(x + other)) of one image and group, in channels-last layout."""
    program = tl.program_id(0)
    group = program % GROUPS
    p, c = tl.arange(0, P), tl.arange(0, C)
    inside = (p[:, None] < PIXELS) & (c[None, :] < WIDTH)
    start = (program // GROUPS).to(tl.int64) * PIXELS * CHANNELS + group * WIDTH
    at = p[:, None] * CHANNELS + c[None, :]
    value = tl.load(x + start + at, inside, 0.0).to(tl.float32)
    if ADDS:
        value += tl.load(other + start + at, inside, 0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + start + at, value, inside)
        value = value.to(tl.float32)
    many = PIXELS * WIDTH
    middle = tl.sum(value) / many
    centred = tl.where(inside, value - middle, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred) / many + eps)
    tl.store(mean + program, middle)
    tl.store(rstd + program, scale)
    w = tl.load(weight + group * WIDTH + c, c < WIDTH, 0.0).to(tl.float32)
    b = tl.load(bias + group * WIDTH + c, c < WIDTH, 0.0).to(tl.float32)
    out = tl.maximum(centred * scale * w[None, :] + b[None, :], 0.0)
    tl.store(y + start + at, out.to(y.dtype.element_ty), inside)


@triton.jit
def _norm_relu_backward(
    dy, dtotal, x, weight, bias, mean, rstd, dx, shares, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradients of one image and group: all of dx, and its shares of the weight's and the bias's."""
    program = tl.program_id(0)
    image, group = program // GROUPS, program % GROUPS
    p, c = tl.arange(0, P), tl.arange(0, C)
    start = image.to(tl.int64) * PIXELS * CHANNELS + group * WIDTH
    w = tl.load(weight + group * WIDTH + c, c < WIDTH, 0.0).to(tl.float32)
    b = tl.load(bias + group * WIDTH + c, c < WIDTH, 0.0).to(tl.float32)
    middle, scale = tl.load(mean + program), tl.load(rstd + program)
    by_weight = tl.zeros([C], tl.float32)
    by_bias = tl.zeros([C], tl.float32)
    for first in tl.static_range(0, PIXELS, P):
        inside = ((first + p)[:, None] < PIXELS) & (c[None, :] < WIDTH)
        at = start + (first + p)[:, None] * CHANNELS + c[None, :]
        normed = (tl.load(x + at, inside, 0.0).to(tl.float32) - middle) * scale
        grad = tl.load(dy + at, inside, 0.0).to(tl.float32)
        grad = tl.where(normed * w[None, :] + b[None, :] > 0, grad, 0.0)
        by_weight += tl.sum(grad * normed, 0)
        by_bias += tl.sum(grad, 0)
    mine = image * 2 * CHANNELS + group * WIDTH + c
    tl.store(shares + mine, by_weight, c < WIDTH)
    tl.store(shares + mine + CHANNELS, by_bias, c < WIDTH)
    many = PIXELS * WIDTH
    along_x, along_one = tl.sum(by_weight * w) / many, tl.sum(by_bias * w) / many
    for first in tl.static_range(0, PIXELS, P):
        inside = ((first + p)[:, None] < PIXELS) & (c[None, :] < WIDTH)
        at = start + (first + p)[:, None] * CHANNELS + c[None, :]
        normed = (tl.load(x + at, inside, 0.0).to(tl.float32) - middle) * scale
        grad = tl.load(dy + at, inside, 0.0).to(tl.float32)
        grad = tl.where(normed * w[None, :] + b[None, :] > 0, grad, 0.0)
        out = scale * (grad * w[None, :] - along_one - normed * along_x)
        if ADDS:
            out += tl.load(dtotal + at, inside, 0.0).to(tl.float32)
        tl.store(dx + at, out.to(dx.dtype.element_ty), inside)


@triton.jit
def _sum_rows(rows, out, number, width, PARTS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The sum of the rows of a matrix, for some columns."""
    column = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([C], tl.float32)
    for part in tl.static_range(PARTS):
        row = part * R + tl.arange(0, R)
        inside = (row[:, None] < number) & (column[None, :] < width)
        total += tl.sum(tl.load(rows + row[:, None] * width + column[None, :], inside, 0.0), 0)
    tl.store(out + column, total.to(out.dtype.element_ty), column < width)


def sum_rows(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sums the rows of a float32 matrix."""
    number, width = rows.shape
    out = rows.new_empty(width, dtype=dtype)
    _sum_rows[(triton.cdiv(width, 32),)](rows, out, number, width, triton.cdiv(number, 64), 64, 32)
    return out


class _NormRelu(Function):
    """Returns x + other and relu(norm(x + other)), or only relu(norm(x)) without `other`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float
    ) -> Any:
        ctx.set_materialize_grads(False)
        images, channels = x.shape[:2]
        pixels, width = x.shape[2] * x.shape[3], channels // groups
        total = x if other is None else torch.empty_like(x)
        y = torch.empty_like(x)
        mean, rstd = x.new_empty((2, images * groups), dtype=torch.float32).unbind()
        block = triton.next_power_of_2(pixels), triton.next_power_of_2(width)
        _norm_relu[(images * groups,)](
            x, x if other is None else other, weight, bias, total, y, mean, rstd, eps, channels, pixels,
            groups, width, other is not None, *block, num_warps=_warps(block[0] * block[1]),
        )  # fmt: skip
        ctx.save_for_backward(total, weight, bias, mean, rstd)
        ctx.groups, ctx.adds = groups, other is not None
        return (total, y) if ctx.adds else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        dtotal, dy = grads if ctx.adds else (None, *grads)
        if dy is None:
            return dtotal, dtotal if ctx.adds else None, None, None, None, None
        images, channels = x.shape[:2]
        pixels, width = x.shape[2] * x.shape[3], channels // ctx.groups
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(x)
        shares = weight.new_empty((images, 2 * channels), dtype=torch.float32)
        if dtotal is not None:
            dtotal = dtotal.contiguous(memory_format=torch.channels_last)
        column = triton.next_power_of_2(width)
        numbers, warps = (LARGEST_GROUP, 16) if pixels * width > 16384 else (8192, 8)
        block = min(triton.next_power_of_2(pixels), max(1, numbers // column))
        _norm_relu_backward[(images * ctx.groups,)](
            dy, dy if dtotal is None else dtotal, x, weight, bias, mean, rstd, dx, shares, channels, pixels,
            ctx.groups, width, dtotal is not None, block, column, num_warps=warps,
        )  # fmt: skip
        dweight, dbias = sum_rows(shares).to(weight.dtype).view(2, channels).unbind()
        return dx, dx if ctx.adds else None, dweight, dbias, None, None


def fits(x: Tensor, weight: Tensor | None, groups: int) -> bool:
    """Returns whether the kernels support this input."""
    return (
        weight is not None
        and x.is_cuda
        and x.dim() == 4
        and x.dtype in (torch.float32, torch.bfloat16)
        and triton.next_power_of_2(x.shape[2] * x.shape[3]) * triton.next_power_of_2(x.shape[1] // groups)
        <= LARGEST_GROUP
    )


def norm_relu(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """Computes relu(group_norm(x)) in one pass."""
    if not fits(x, weight, groups):
        return torch.relu(torch.nn.functional.group_norm(x, groups, weight, bias, eps))
    x = x.contiguous(memory_format=torch.channels_last)
    y: Tensor = _NormRelu.apply(x, None, weight, bias, groups, eps)
    return y


def add_norm_relu(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Computes a + b and relu(group_norm(a + b)) in one pass."""
    if a.shape != b.shape or a.dtype != b.dtype or not fits(a, weight, groups):
        total = a + b
        return total, norm_relu(total, weight, bias, groups, eps)
    a, b = (t.contiguous(memory_format=torch.channels_last) for t in (a, b))
    both: tuple[Tensor, Tensor] = _NormRelu.apply(a, b, weight, bias, groups, eps)
    return both


def _warps(numbers: int) -> int:
    return max(4, min(16, numbers // 2048))
