"""Algebra of named weights: select, pack, average by holder, distance, finiteness, bytes.

A nested model holds the *leading corner* of each of the supernet's tensors: the whole tensor if nesting is by depth,
the leading channels if it is by width. The shape of a held tensor therefore says which elements are held.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

Weights = dict[str, Tensor]
TierModels = dict[str, Weights]
"""A model for each tier."""
Shapes = dict[str, tuple[int, ...]]
NO_ROWS: Mapping[str, Tensor] = {}
"""No tensor is restricted to some of its rows."""
SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names that a safetensors file gives to the types of tensors."""


def take_corner(tensor: Tensor, shape: Iterable[int]) -> Tensor:
    """Returns the leading corner of that shape as a view, or the tensor itself if it has that shape."""
    shape = tuple(shape)
    return tensor if tensor.shape == shape else tensor[tuple(slice(n) for n in shape)]


def select(weights: Mapping[str, Tensor], shapes: Shapes) -> Weights:
    """Returns [w]_M of Assumption 1: the weights that a nested model holds."""
    return {name: take_corner(weights[name], shape) for name, shape in shapes.items()}


def overlay(models: Sequence[Mapping[str, Tensor]]) -> Weights:
    """Merges models into one: each tensor is as large as the largest of its name, and later models overwrite."""
    laid: Weights = {}
    for model in models:
        for name, tensor in model.items():
            under = laid.get(name)
            if under is None or all(map(operator.le, under.shape, tensor.shape)):
                laid[name] = tensor
            elif under.shape != tensor.shape:
                shape = tuple(map(max, under.shape, tensor.shape))
                laid[name] = tensor.new_zeros(shape)
                take_corner(laid[name], under.shape).copy_(under)
                take_corner(laid[name], tensor.shape).copy_(tensor)
    return laid


def shapes_of(weights: Mapping[str, Tensor]) -> Shapes:
    """Returns name -> shape."""
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Returns R(a, b) = ‖a − [b]_M‖², over the weights that both hold."""
    total = 0.0
    for name, tensor in a.items():
        if name in b:
            both = tuple(map(min, tensor.shape, b[name].shape))
            one, other = take_corner(tensor, both), take_corner(b[name], both)
            total += 0.0 if one is other else float((one.double() - other.double()).square().sum())
    return total


def pack(weights: Mapping[str, Tensor]) -> Tensor:
    """Concatenates all weights into one vector. Returns a view if they are already contiguous."""
    tensors = list(weights.values())
    if not tensors:
        return torch.zeros(0)
    if _are_contiguous(tensors):
        return tensors[0].as_strided((count_elements(weights),), (1,))
    kind = packed_type(weights)
    return torch.cat([tensor.reshape(-1).to(kind) for tensor in tensors])


def packed_type(weights: Mapping[str, Tensor]) -> torch.dtype:
    """Returns the type of the packed vector: one that holds all types, float64 if floats and integers are mixed."""
    kind = reduce(torch.promote_types, {tensor.dtype for tensor in weights.values()}, torch.bool)
    if kind.is_floating_point and not all(tensor.is_floating_point() for tensor in weights.values()):
        kind = torch.float64
    return kind if weights else torch.get_default_dtype()


def unpack(vector: Tensor, like: Mapping[str, Tensor]) -> Weights:
    """Splits a vector into weights of the shapes and types of `like`. They are views where the type is the same."""
    parts = torch.split(vector, [tensor.numel() for tensor in like.values()])
    return {name: _cast(part.view(like[name].shape), like[name].dtype) for name, part in zip(like, parts, strict=True)}


def _cast(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """In that type; whole numbers are rounded to."""
    return (tensor if kind.is_floating_point or not tensor.is_floating_point() else tensor.round()).to(kind)


def _are_contiguous(tensors: Sequence[Tensor]) -> bool:
    first, place = tensors[0], tensors[0].storage_offset()
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        here = tensor.dtype == first.dtype and tensor.untyped_storage().data_ptr() == storage
        if not here or tensor.storage_offset() != place or not tensor.is_contiguous():
            return False
        place += tensor.numel()
    return True


def is_finite(weights: Mapping[str, Tensor]) -> bool:
    """Returns whether no weight is NaN or infinite."""
    # On one vector: each time that a GPU is waited for costs more than the copy.
    vector = pack({name: tensor for name, tensor in weights.items() if tensor.is_floating_point()})
    return not len(vector) or bool(torch.isfinite(torch.stack(vector.aminmax())).all())


def count_elements(weights: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in weights.values())


def numel(shapes: Shapes) -> int:
    """Returns the number of elements of weights with these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def count_bytes(weights: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


class Average:
    """A running average by holder: each element is averaged over the models that hold it.

    Sums are in float64, so that neither the order of the models nor their grouping over processes matters.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.sums: Weights = {}
        self.counts: dict[str, float | Tensor] = {}
        """A number while all elements of a tensor have the same holders, which costs a GPU nothing, else a tensor."""

    def add(self, weights: Mapping[str, Tensor], weight: float = 1.0, rows: Mapping[str, Tensor] = NO_ROWS) -> None:
        """Adds a model; of a tensor in `rows`, only the rows that are true there."""
        for name, tensor in weights.items():
            whole = self.shapes[name]
            if name not in self.sums:
                self.sums[name] = torch.zeros(whole, dtype=torch.float64, device=tensor.device)
                self.counts[name] = 0.0
            counts = self.counts[name]
            if isinstance(counts, float) and (tensor.shape != whole or name in rows):
                # From here on the elements are counted one by one.
                counts = self.counts[name] = torch.full_like(self.sums[name], counts)
            sums = take_corner(self.sums[name], tensor.shape)
            if name in rows and isinstance(counts, Tensor):
                sums[rows[name]] += tensor[rows[name]].double() * weight
                take_corner(counts, tensor.shape)[rows[name]] += weight
                continue
            sums.add_(tensor, alpha=weight)
            if isinstance(counts, Tensor):
                take_corner(counts, tensor.shape).add_(weight)
            else:
                self.counts[name] = counts + weight

    def combine(self, other: Average) -> None:
        """Adds what another average has added."""
        for name in other.sums:
            self.sums[name] = self.sums[name] + other.sums[name] if name in self.sums else other.sums[name]
            self.counts[name] = self.counts[name] + other.counts[name] if name in self.counts else other.counts[name]

    def finish(self, otherwise: Mapping[str, Tensor]) -> Weights:
        """Returns the average, or `otherwise` for elements without a holder, in its shapes and types."""
        return {name: self._mean(name, kept) for name, kept in otherwise.items()}

    def is_held(self, name: str, like: Tensor) -> Tensor:
        """Returns, for each element of a tensor of the shape of `like`, whether any model held it."""
        counts = self.counts.get(name, 0.0)
        if isinstance(counts, Tensor):
            return take_corner(counts, like.shape) > 0
        return torch.full(like.shape, counts > 0, device=like.device)

    def _mean(self, name: str, kept: Tensor) -> Tensor:
        if name not in self.sums:
            return kept
        sums, counts = take_corner(self.sums[name], kept.shape), self.counts[name]
        if isinstance(counts, Tensor):
            counts = take_corner(counts, kept.shape)
            mean = torch.where(counts > 0, sums / counts, kept.double())
        else:
            mean = sums / counts if counts > 0 else kept.double()
        return _cast(mean, kept.dtype)
