"""The whole update of a step, from the gradient to the weights, in two passes over flat vectors (Triton)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

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
