"""The whole update of a step, from the gradients to the weights, in two passes over memory (Triton)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedhen.runtimes.gpu.layout import Layout

BLOCK = 4096
"""Numbers that one program updates: a divisor of the sizes of most weights, so that most blocks are whole."""
SETTINGS = ("lr", "clip", "pull", "decay", "momentum")


@dataclass
class State:
    """What a device's steps read and write, as flat vectors in one order."""

    weights: Tensor
    low: Tensor
    """The leading weights once more, in the precision of products."""
    settings: Tensor
    """The numbers that SETTINGS names: on the GPU, so that a captured step follows them."""
    offset: Tensor | None
    """The correction's, where the local variant has one."""
    momenta: Tensor | None
    begins: Tensor
    counts: Tensor
    """The blocks: each is a part of one weight."""
    sums: Tensor
    """Room for the blocks' sums of squares."""
    factor: Tensor
    """Room for what the clip leaves of the gradient."""


def new_state(layout: Layout, like: Tensor, corrects: bool, moves: bool) -> State:
    """Zeros for the weights of a layout."""
    zeros = partial(like.new_zeros, dtype=like.dtype)
    parts = [part for name in layout.places for part in blocks(layout, name)]
    begins, counts = torch.tensor(parts, dtype=torch.int32, device=like.device).T.contiguous()
    return State(
        weights=zeros(layout.size),
        low=like.new_zeros(layout.lowered, dtype=torch.bfloat16),
        settings=zeros(len(SETTINGS)),
        offset=zeros(layout.size) if corrects else None,
        momenta=zeros(layout.size) if moves else None,
        begins=begins,
        counts=counts,
        sums=zeros(len(parts)),
        factor=zeros(1),
    )


def blocks(layout: Layout, name: str) -> list[tuple[int, int]]:
    """Where each block of a weight begins in the flat vectors, and how many numbers it has."""
    begin, many = layout.places[name], layout.shapes[name].numel()
    return [(begin + first, min(BLOCK, many - first)) for first in range(0, many, BLOCK)]


def addresses(layout: Layout, gradients: Mapping[str, Tensor]) -> Sequence[int]:
    """Where the gradient of each block lies in memory; the gradients must lie as the weights do in the layout."""
    return [
        gradients[name].data_ptr() + (begin - layout.places[name]) * gradients[name].element_size()
        for name in layout.places
        for begin, _ in blocks(layout, name)
    ]


@triton.jit
def _corrected(w, offset, pull, address, begin, count, lowered, LOW, CORRECTS, WHOLE: tl.constexpr, BLOCK):
    """A block of the gradient, with the local variant's correction."""
    at = tl.arange(0, BLOCK)
    # A mask that is true everywhere lets the compiler read many numbers at once.
    inside = at < BLOCK if WHOLE else at < count
    if begin < lowered:
        grad = tl.load(tl.multiple_of(address.to(tl.pointer_type(LOW)), 16) + at, inside, 0.0).to(w.dtype.element_ty)
    else:
        grad = tl.load(tl.multiple_of(address.to(w.dtype), 16) + at, inside, 0.0)
    if CORRECTS:
        grad += tl.load(offset + begin + at, inside, 0.0) + pull * tl.load(w + begin + at, inside, 0.0)
    return grad, inside


@triton.jit
def _squares(
    w, offset, settings, table, begins, counts, sums, lowered,
    LOW: tl.constexpr, CORRECTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the squares of one block of the corrected gradient."""
    block = tl.program_id(0)
    count, address, pull = tl.load(counts + block), tl.load(table + block), tl.load(settings + 2)
    begin = tl.multiple_of(tl.load(begins + block), 64)
    if count == BLOCK:
        grad, _ = _corrected(w, offset, pull, address, begin, count, lowered, LOW, CORRECTS, True, BLOCK)
        tl.store(sums + block, tl.sum(grad * grad))
    else:
        grad, _ = _corrected(w, offset, pull, address, begin, count, lowered, LOW, CORRECTS, False, BLOCK)
        tl.store(sums + block, tl.sum(grad * grad))


@triton.jit
def _clip(sums, settings, factor, number, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """How much of the gradient the clip leaves, as torch.nn.utils.clip_grad_norm_ has it."""
    total = tl.zeros([BLOCK], sums.dtype.element_ty)
    for part in tl.static_range(PARTS):
        at = part * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(sums + at, at < number, 0.0)
    left = tl.load(settings + 1) / (tl.sqrt(tl.sum(total)) + 1e-6)
    # A norm that is not a number stays one, and makes weights that are none.
    tl.store(factor, tl.where(left > 1.0, 1.0, left))


@triton.jit
def _step(w, low, momenta, settings, begin, grad, inside, lowered, LOW, MOVES, BLOCK: tl.constexpr):
    """Decay, momentum and step of one block of the clipped gradient."""
    at = begin + tl.arange(0, BLOCK)
    value = tl.load(w + at, inside, 0.0)
    grad += tl.load(settings + 3) * value
    if MOVES:
        grad += tl.load(settings + 4) * tl.load(momenta + at, inside, 0.0)
        tl.store(momenta + at, grad, inside)
    value -= tl.load(settings) * grad
    tl.store(w + at, value, inside)
    if begin < lowered:
        tl.store(low + at, value.to(LOW), inside)


@triton.jit
def _update(
    w, low, offset, momenta, settings, table, begins, counts, factor, lowered,
    LOW: tl.constexpr, CORRECTS: tl.constexpr, MOVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The step of one block, and the lower-precision copy of the weights beside."""
    block = tl.program_id(0)
    count, address, pull = tl.load(counts + block), tl.load(table + block), tl.load(settings + 2)
    begin, left = tl.multiple_of(tl.load(begins + block), 64), tl.load(factor)
    if count == BLOCK:
        grad, inside = _corrected(w, offset, pull, address, begin, count, lowered, LOW, CORRECTS, True, BLOCK)
        _step(w, low, momenta, settings, begin, grad * left, inside, lowered, LOW, MOVES, BLOCK)
    else:
        grad, inside = _corrected(w, offset, pull, address, begin, count, lowered, LOW, CORRECTS, False, BLOCK)
        _step(w, low, momenta, settings, begin, grad * left, inside, lowered, LOW, MOVES, BLOCK)


def update(state: State, table: Tensor) -> None:
    """One step of Alg. 2: correction, clip, decay, momentum, step. `table` holds the gradient blocks' addresses."""
    number, lowered = len(state.begins), len(state.low)
    offset = state.weights if state.offset is None else state.offset
    momenta = state.weights if state.momenta is None else state.momenta
    corrects, moves = state.offset is not None, state.momenta is not None
    blocks = table, state.begins, state.counts
    _squares[(number,)](
        state.weights, offset, state.settings, *blocks, state.sums, lowered, tl.bfloat16, corrects, BLOCK
    )
    _clip[(1,)](state.sums, state.settings, state.factor, number, triton.cdiv(number, 1024), 1024)
    _update[(number,)](
        state.weights, state.low, offset, momenta, state.settings, *blocks, state.factor,
        lowered, tl.bfloat16, corrects, moves, BLOCK,
    )  # fmt: skip
