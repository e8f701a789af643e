"""Triton kernels of the GPU engine: GroupNorm with ReLU in one pass each way, and the whole update of a step in two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

LARGEST_GROUP = 32768
"""Numbers of one image and group that a program can hold at once; larger groups are left to torch."""


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
    dy, dtotal, x, weight, bias, mean, rstd, dx, dweight, dbias, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradients of one image and group: dx whole, and its share of dweight and dbias."""
    program = tl.program_id(0)
    image, group = program // GROUPS, program % GROUPS
    p, c = tl.arange(0, P), tl.arange(0, C)
    start = image.to(tl.int64) * PIXELS * CHANNELS + group * WIDTH
    w = tl.load(weight + group * WIDTH + c, c < WIDTH, 0.0).to(tl.float32)
    b = tl.load(bias + group * WIDTH + c, c < WIDTH, 0.0).to(tl.float32)
    middle, scale = tl.load(mean + program), tl.load(rstd + program)
    by_weight = tl.zeros([C], tl.float32)
    by_bias = tl.zeros([C], tl.float32)
    for first in range(0, PIXELS, P):
        inside = ((first + p)[:, None] < PIXELS) & (c[None, :] < WIDTH)
        at = start + (first + p)[:, None] * CHANNELS + c[None, :]
        normed = (tl.load(x + at, inside, 0.0).to(tl.float32) - middle) * scale
        grad = tl.load(dy + at, inside, 0.0).to(tl.float32)
        grad = tl.where(normed * w[None, :] + b[None, :] > 0, grad, 0.0)
        by_weight += tl.sum(grad * normed, 0)
        by_bias += tl.sum(grad, 0)
    mine = image * CHANNELS + group * WIDTH + c
    tl.store(dweight + mine, by_weight, c < WIDTH)
    tl.store(dbias + mine, by_bias, c < WIDTH)
    many = PIXELS * WIDTH
    along_x, along_one = tl.sum(by_weight * w) / many, tl.sum(by_bias * w) / many
    for first in range(0, PIXELS, P):
        inside = ((first + p)[:, None] < PIXELS) & (c[None, :] < WIDTH)
        at = start + (first + p)[:, None] * CHANNELS + c[None, :]
        normed = (tl.load(x + at, inside, 0.0).to(tl.float32) - middle) * scale
        grad = tl.load(dy + at, inside, 0.0).to(tl.float32)
        grad = tl.where(normed * w[None, :] + b[None, :] > 0, grad, 0.0)
        out = scale * (grad * w[None, :] - along_one - normed * along_x)
        if ADDS:
            out += tl.load(dtotal + at, inside, 0.0).to(tl.float32)
        tl.store(dx + at, out.to(dx.dtype.element_ty), inside)


class _NormRelu(Function):
    """(x + other, relu(norm(x + other))); without `other` the first is x itself."""

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
        parts = weight.new_empty((2, images, channels), dtype=torch.float32)
        block = min(triton.next_power_of_2(pixels), max(1, 4096 // triton.next_power_of_2(width)))
        if dtotal is not None:
            dtotal = dtotal.contiguous(memory_format=torch.channels_last)
        _norm_relu_backward[(images * ctx.groups,)](
            dy, dy if dtotal is None else dtotal, x, weight, bias, mean, rstd, dx, parts[0], parts[1], channels, pixels,
            ctx.groups, width, dtotal is not None, block, triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
        dweight, dbias = parts.sum(1).to(weight.dtype).unbind()
        return dx, dx if ctx.adds else None, dweight, dbias, None, None


def fits(x: Tensor, weight: Tensor | None, groups: int) -> bool:
    """Whether the kernels can take this input."""
    return (
        weight is not None
        and x.is_cuda
        and x.dim() == 4
        and x.dtype in (torch.float32, torch.bfloat16)
        and triton.next_power_of_2(x.shape[2] * x.shape[3]) * triton.next_power_of_2(x.shape[1] // groups)
        <= LARGEST_GROUP
    )


def norm_relu(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """relu(group_norm(x)) in one pass."""
    if not fits(x, weight, groups):
        return torch.relu(torch.nn.functional.group_norm(x, groups, weight, bias, eps))
    x = x.contiguous(memory_format=torch.channels_last)
    y: Tensor = _NormRelu.apply(x, None, weight, bias, groups, eps)  # type: ignore[no-untyped-call]
    return y


def add_norm_relu(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """a + b, and relu(group_norm(a + b)), in one pass."""
    if a.shape != b.shape or a.dtype != b.dtype or not fits(a, weight, groups):
        total = a + b
        return total, norm_relu(total, weight, bias, groups, eps)
    a, b = (t.contiguous(memory_format=torch.channels_last) for t in (a, b))
    both: tuple[Tensor, Tensor] = _NormRelu.apply(a, b, weight, bias, groups, eps)  # type: ignore[no-untyped-call]
    return both


def _warps(numbers: int) -> int:
    return max(4, min(16, numbers // 2048))


BLOCK = 8192


@triton.jit
def _corrected(w, g, offset, pull, at, inside, CORRECTS: tl.constexpr):
    grad = tl.load(g + at, inside, 0.0).to(w.dtype.element_ty)
    if CORRECTS:
        grad += tl.load(offset + at, inside, 0.0) + pull * tl.load(w + at, inside, 0.0)
    return grad


@triton.jit
def _squares(w, g, offset, settings, sums, size, CORRECTS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the squares of one block of the corrected gradient."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grad = _corrected(w, g, offset, tl.load(settings + 2), at, at < size, CORRECTS)
    tl.store(sums + tl.program_id(0), tl.sum(grad * grad))


@triton.jit
def _update(
    w, low, g, offset, momenta, settings, sums, size, lowered, blocks,
    CORRECTS: tl.constexpr, MOVES: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Clip, decay, momentum and step of one block, and the lower-precision copy of the weights beside."""
    lr, clip, decay = tl.load(settings), tl.load(settings + 1), tl.load(settings + 3)
    part = tl.arange(0, SUMS)
    norm = tl.sqrt(tl.sum(tl.load(sums + part, part < blocks, 0.0)))
    # As torch.nn.utils.clip_grad_norm_ has it; a norm that is not a number makes weights that are none.
    factor = clip / (norm + 1e-6)
    factor = tl.where(factor > 1.0, 1.0, factor)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    grad = _corrected(w, g, offset, tl.load(settings + 2), at, inside, CORRECTS) * factor
    value = tl.load(w + at, inside, 0.0)
    grad += decay * value
    if MOVES:
        grad += tl.load(settings + 4) * tl.load(momenta + at, inside, 0.0)
        tl.store(momenta + at, grad, inside)
    value -= lr * grad
    tl.store(w + at, value, inside)
    tl.store(low + at, value.to(low.dtype.element_ty), inside & (at < lowered))


@dataclass
class State:
    """What a device's steps read and write, as flat vectors in one order."""

    weights: Tensor
    low: Tensor
    """The leading weights once more, in the precision of products."""
    gradient: Tensor
    settings: Tensor
    """Learning rate, clip, pull, decay, momentum: on the device, so that a captured step follows them."""
    offset: Tensor | None
    """The correction's, where the local variant has one."""
    momenta: Tensor | None
    sums: Tensor
    """Room for the blocks' sums of squares."""


def update(state: State) -> None:
    """One step of Alg. 2 on flat vectors: correction, clip, decay, momentum, step."""
    size = len(state.weights)
    blocks = triton.cdiv(size, BLOCK)
    corrects, moves = state.offset is not None, state.momenta is not None
    offset = state.weights if state.offset is None else state.offset
    momenta = state.weights if state.momenta is None else state.momenta
    _squares[(blocks,)](
        state.weights, state.gradient, offset, state.settings, state.sums, size, corrects, BLOCK, num_warps=8
    )
    _update[(blocks,)](
        state.weights, state.low, state.gradient, offset, momenta, state.settings, state.sums,
        size, len(state.low), blocks, corrects, moves, BLOCK, triton.next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip


def new_state(size: int, lowered: int, like: Tensor, corrects: bool, moves: bool) -> State:
    """Zeros for that many weights, of which the leading `lowered` have a copy in bf16."""
    zeros = partial(like.new_zeros, dtype=like.dtype)
    return State(
        weights=zeros(size),
        low=like.new_zeros(lowered, dtype=torch.bfloat16),
        gradient=zeros(size),
        settings=zeros(len(SETTINGS)),
        offset=zeros(size) if corrects else None,
        momenta=zeros(size) if moves else None,
        sums=zeros(triton.cdiv(size, BLOCK)),
    )


SETTINGS = ("lr", "clip", "pull", "decay", "momentum")
