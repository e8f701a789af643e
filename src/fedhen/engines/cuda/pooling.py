"""Mix pooling in one kernel each way, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function

from fedhen.models.pooling import mix_pool2d

BLOCK = 256


@triton.jit
def _mix_pool(x, alpha, y, size, OUT: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Some windows: x with the channels last, y with the channels first, so that a head reads it as it is."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    c, column, row, n = at % C, at // C % OUT, at // (C * OUT) % OUT, at // (C * OUT * OUT)
    corner = ((n * OUT + row) * K * OUT * K + column * K) * C + c
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    # A whole window written out would take minutes to compile where it is the whole image.
    for i in range(K):
        for j in tl.static_range(K):
            value = tl.load(x + corner + (i * OUT * K + j) * C, inside, 0.0).to(tl.float32)
            top = tl.where(value > top, value, top)
            total += value
    a = tl.load(alpha).to(tl.float32)
    out = a * top + (1 - a) * (total / (K * K))
    tl.store(y + ((n * C + c) * OUT + row) * OUT + column, out.to(y.dtype.element_ty), inside)


@triton.jit
def _mix_pool_backward(
    dy, x, alpha, dx, shares, size, OUT: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradients of some windows, the first of equal maxima taking the maximum's."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    c, column, row, n = at % C, at // C % OUT, at // (C * OUT) % OUT, at // (C * OUT * OUT)
    corner = ((n * OUT + row) * K * OUT * K + column * K) * C + c
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for i in range(K):
        for j in tl.static_range(K):
            value = tl.load(x + corner + (i * OUT * K + j) * C, inside, 0.0).to(tl.float32)
            where = tl.where(value > top, i * K + j, where)
            top = tl.where(value > top, value, top)
            total += value
    a = tl.load(alpha).to(tl.float32)
    grad = tl.load(dy + ((n * C + c) * OUT + row) * OUT + column, inside, 0.0).to(tl.float32)
    tl.store(shares + tl.program_id(0), tl.sum(tl.where(inside, grad * (top - total / (K * K)), 0.0)))
    for i in range(K):
        for j in tl.static_range(K):
            out = grad * ((1 - a) / (K * K) + tl.where(where == i * K + j, a, 0.0))
            tl.store(dx + corner + (i * OUT * K + j) * C, out.to(dx.dtype.element_ty), inside)


class _MixPool(Function):
    """Mix pooling of square images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, kernel: int) -> Tensor:
        n, channels, height, _ = x.shape
        out = height // kernel
        y = x.new_empty((n, channels, out, out))
        _mix_pool[(triton.cdiv(y.numel(), BLOCK),)](x, alpha, y, y.numel(), out, channels, kernel, BLOCK)
        ctx.save_for_backward(x, alpha)
        ctx.kernel = kernel
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, alpha = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        programs = triton.cdiv(dy.numel(), BLOCK)
        shares = x.new_empty(programs, dtype=torch.float32)
        _mix_pool_backward[(programs,)](
            dy, x, alpha, dx, shares, dy.numel(), dy.shape[2], x.shape[1], ctx.kernel, BLOCK
        )
        return dx, shares.sum().to(alpha.dtype), None


def mix_pool(x: Tensor, alpha: Tensor, kernel: int) -> Tensor:
    """α·max + (1 − α)·average over windows of kernel × kernel."""
    square = x.dim() == 4 and x.shape[2] == x.shape[3] and x.shape[2] % kernel == 0
    if not (square and x.is_cuda and x.dtype in (torch.float32, torch.bfloat16)):
        return mix_pool2d(x, alpha, kernel)
    x = x.contiguous(memory_format=torch.channels_last)
    y: Tensor = _MixPool.apply(x, alpha, kernel)
    return y
