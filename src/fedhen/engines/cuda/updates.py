"""Triton kernels for the update of a step, from gradients to weights, in two passes over memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedhen.engines.cuda.layout import Layout

BLOCK = 4096
"""Elements that one program updates. It divides the sizes of most weights, so that most blocks are whole."""
TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
SETTINGS = ("lr", "clip", "pull", "decay", "momentum")


@dataclass(frozen=True)
class Blocks:
    """The parts in which weights are updated, each of one weight. The first `whole` parts need no mask."""

    parts: Sequence[tuple[str, int, int]]
    """Weight, position of the part in the flat vectors, and number of its elements."""
    whole: int
    """The number of parts, from the first, that have BLOCK elements and gradients of one type."""
    begins: Tensor
    counts: Tensor


@dataclass
class State:
    """What a device's steps read and write: flat vectors in the order of the layout."""

    weights: Tensor
    low: Tensor
    """The first weights again, in the precision of products."""
    settings: Tensor
    """The values that SETTINGS names. They are on the GPU, so that a captured step reads the current ones."""
    offset: Tensor | None
    """The correction's offset, if the local variant has one."""
    momenta: Tensor | None
    blocks: Blocks
    sums: Tensor
    """Buffer for the blocks' sums of squares."""
    factor: Tensor
    """Buffer for the factor by which the clip scales the gradient."""


def make_state(layout: Layout, like: Tensor, has_offset: bool, has_momentum: bool) -> State:
    """Makes a state of zeros for a layout."""
    zeros, found = partial(like.new_zeros, dtype=like.dtype), make_blocks(layout, like.device)
    return State(
        weights=zeros(layout.size),
        low=like.new_zeros(layout.low_size, dtype=torch.bfloat16),
        settings=zeros(len(SETTINGS)),
        offset=zeros(layout.size) if has_offset else None,
        momenta=zeros(layout.size) if has_momentum else None,
        blocks=found,
        sums=zeros(len(found.parts)),
        factor=zeros(1),
    )


def make_blocks(layout: Layout, device: torch.device) -> Blocks:
    """Divides a layout into blocks."""
    parts = [
        (name, begin + first, min(BLOCK, layout.shapes[name].numel() - first))
        for name, begin in layout.offsets.items()
        for first in range(0, layout.shapes[name].numel(), BLOCK)
    ]

    def is_whole(part: tuple[str, int, int]) -> bool:
        # In full precision all gradients have one type.
        return part[2] == BLOCK and (part[1] < layout.low_size or not layout.low_size)

    parts.sort(key=lambda part: not is_whole(part))
    begins, counts = (torch.tensor([p[k] for p in parts], dtype=torch.int32, device=device) for k in (1, 2))
    return Blocks(parts, sum(map(is_whole, parts)), begins, counts)


def find_addresses(layout: Layout, blocks: Blocks, gradients: Mapping[str, Tensor]) -> Sequence[int]:
    """Returns the address of each block's gradient. Gradients must have the strides of the weights in the layout."""
    return [
        gradients[name].data_ptr() + (begin - layout.offsets[name]) * gradients[name].element_size()
        for name, begin, _ in blocks.parts
    ]


@triton.jit
def _load_gradient(w, offset, settings, address, begin, count, low_size, LEAD, CORRECTS, WHOLE: tl.constexpr, BLOCK):
    """Loads a block of the gradient with the local variant's correction, and the mask of its elements."""
    at = tl.arange(0, BLOCK)
    # Without a mask, and with one type, the compiler reads many elements at once.
    inside = at < BLOCK if WHOLE else at < count
    if WHOLE:
        grad = tl.load(tl.multiple_of(address.to(tl.pointer_type(LEAD)), 16) + at).to(w.dtype.element_ty)
    elif begin < low_size:
        grad = tl.load(address.to(tl.pointer_type(LEAD)) + at, inside, 0.0).to(w.dtype.element_ty)
    else:
        grad = tl.load(address.to(w.dtype) + at, inside, 0.0)
    if CORRECTS:
        grad += tl.load(offset + begin + at, inside, 0.0)
        grad += tl.load(settings + 2) * tl.load(w + begin + at, inside, 0.0)
    return grad, inside


@triton.jit
def _squares(
    w, offset, settings, table, begins, counts, sums, low_size, first,
    LEAD: tl.constexpr, CORRECTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the squares of one block of the corrected gradient."""
    block = first + tl.program_id(0)
    count, address = tl.load(counts + block), tl.load(table + block)
    begin = tl.multiple_of(tl.load(begins + block), 64)
    grad, _ = _load_gradient(w, offset, settings, address, begin, count, low_size, LEAD, CORRECTS, WHOLE, BLOCK)
    tl.store(sums + block, tl.sum(grad * grad))


@triton.jit
def _clip(sums, settings, factor, number, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The factor of the clip, as in torch.nn.utils.clip_grad_norm_."""
    total = tl.zeros([BLOCK], sums.dtype.element_ty)
    for part in tl.static_range(PARTS):
        at = part * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(sums + at, at < number, 0.0)
    left = tl.load(settings + 1) / (tl.sqrt(tl.sum(total)) + 1e-6)
    # A NaN norm must make NaN weights, so that the device is dropped.
    tl.store(factor, tl.where(left > 1.0, 1.0, left))


@triton.jit
def _update(
    w, low, offset, momenta, settings, table, begins, counts, factor, low_size, first,
    LEAD: tl.constexpr, CORRECTS: tl.constexpr, MOVES: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Clip, decay, momentum and step of one block, and the low-precision copy of its weights."""
    block = first + tl.program_id(0)
    count, address = tl.load(counts + block), tl.load(table + block)
    begin = tl.multiple_of(tl.load(begins + block), 64)
    grad, inside = _load_gradient(w, offset, settings, address, begin, count, low_size, LEAD, CORRECTS, WHOLE, BLOCK)
    at = begin + tl.arange(0, BLOCK)
    value = tl.load(w + at, inside, 0.0)
    grad = grad * tl.load(factor) + tl.load(settings + 3) * value
    if MOVES:
        grad += tl.load(settings + 4) * tl.load(momenta + at, inside, 0.0)
        tl.store(momenta + at, grad, inside)
    value -= tl.load(settings) * grad
    tl.store(w + at, value, inside)
    if begin < low_size:
        tl.store(low + at, value.to(low.dtype.element_ty), inside)


def update(state: State, table: Tensor) -> None:
    """Updates the weights (Alg. 2): correction, clip, decay, momentum, step. `table` holds the blocks' addresses."""
    blocks, low_size = state.blocks, len(state.low)
    offset = state.weights if state.offset is None else state.offset
    momenta = state.weights if state.momenta is None else state.momenta
    has_offset, has_momentum = state.offset is not None, state.momenta is not None
    lead = tl.bfloat16 if low_size else TYPES[state.weights.dtype]
    number, places = len(blocks.parts), (table, blocks.begins, blocks.counts)
    pieces = [(first, many, whole) for first, many, whole in
              ((0, blocks.whole, True), (blocks.whole, number - blocks.whole, False)) if many]  # fmt: skip
    for first, many, whole in pieces:
        _squares[(many,)](
            state.weights, offset, state.settings, *places, state.sums, low_size, first, lead, has_offset, whole, BLOCK
        )
    _clip[(1,)](state.sums, state.settings, state.factor, number, triton.cdiv(number, 1024), 1024)
    for first, many, whole in pieces:
        _update[(many,)](
            state.weights, state.low, offset, momenta, state.settings, *places, state.factor, low_size, first,
            lead, has_offset, has_momentum, whole, BLOCK,
        )  # fmt: skip
