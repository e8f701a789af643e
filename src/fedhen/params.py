"""Algebra of named weights: select, average by holder, distance, finiteness, bytes.

A nested model holds, of each of the supernet's tensors, all or the *leading corner*: the whole tensor where nesting is
by depth, the leading channels where it is by width. So the shape of a held tensor says which elements are held.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
NO_ROWS: Mapping[str, Tensor] = {}
"""Nothing is restricted to some of its rows."""


def corner(tensor: Tensor, shape: Iterable[int]) -> Tensor:
    """The leading corner of that shape: a view, and the tensor itself where the shape is the whole."""
    shape = tuple(shape)
    return tensor if tensor.shape == shape else tensor[tuple(slice(n) for n in shape)]


def select(weights: Mapping[str, Tensor], shapes: Shapes) -> Weights:
    """[w]_M of Assumption 1: the weights that a nested model holds."""
    return {name: corner(weights[name], shape) for name, shape in shapes.items()}


def overlay(models: Sequence[Mapping[str, Tensor]]) -> Weights:
    """One set of weights that holds all of these: each tensor as large as the largest, later models on top."""
    laid: Weights = {}
    for model in models:
        for name, tensor in model.items():
            under = laid.get(name)
            if under is None or all(map(operator.le, under.shape, tensor.shape)):
                laid[name] = tensor
            elif under.shape != tensor.shape:
                shape = tuple(map(max, under.shape, tensor.shape))
                laid[name] = tensor.new_zeros(shape)
                corner(laid[name], under.shape).copy_(under)
                corner(laid[name], tensor.shape).copy_(tensor)
    return laid


def shapes_of(weights: Mapping[str, Tensor]) -> Shapes:
    """The index of these weights: name -> shape."""
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """R(a, b) = ‖a − [b]_M‖²: over the weights that both hold."""
    total = 0.0
    for name, tensor in a.items():
        if name in b:
            both = tuple(map(min, tensor.shape, b[name].shape))
            one, other = corner(tensor, both), corner(b[name], both)
            total += 0.0 if one is other else float((one.double() - other.double()).square().sum())
    return total


def finite(weights: Mapping[str, Tensor]) -> bool:
    """Whether every weight is a number: neither NaN nor infinite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


def count(weights: Mapping[str, Tensor]) -> int:
    """How many numbers these are."""
    return sum(tensor.numel() for tensor in weights.values())


def size(weights: Mapping[str, Tensor]) -> int:
    """How many bytes these weights are on the wire."""
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


class Average:
    """An average by holder, as a fold: each element over the models that hold it.

    Sums are in float64, so that neither the order of the models nor their grouping over processes shows.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.sums: Weights = {}
        self.counts: Weights = {}

    def add(self, weights: Mapping[str, Tensor], weight: float = 1.0, rows: Mapping[str, Tensor] = NO_ROWS) -> None:
        """Fold one model in; of a tensor that `rows` names, only the rows that are true there."""
        for name, tensor in weights.items():
            whole = self.shapes[name]
            if name not in self.sums:
                self.sums[name] = torch.zeros(whole, dtype=torch.float64, device=tensor.device)
                self.counts[name] = torch.zeros((), dtype=torch.float64, device=tensor.device)
            if (tensor.shape != whole or name in rows) and self.counts[name].dim() == 0:
                # From here on every element counts for itself.
                self.counts[name] = self.counts[name].expand(whole).clone()
            sums, counts = corner(self.sums[name], tensor.shape), _held(self.counts[name], tensor.shape)
            if name in rows:
                sums[rows[name]] += tensor[rows[name]].double() * weight
                counts[rows[name]] += weight
            else:
                sums.add_(tensor, alpha=weight)
                counts.add_(weight)

    def combine(self, other: Average) -> None:
        """Fold in what another average has folded."""
        for name in other.sums:
            self.sums[name] = self.sums[name] + other.sums[name] if name in self.sums else other.sums[name]
            self.counts[name] = self.counts[name] + other.counts[name] if name in self.counts else other.counts[name]

    def finish(self, otherwise: Mapping[str, Tensor]) -> Weights:
        """The average where somebody contributed and `otherwise` where nobody did, in its shapes and types."""
        return {name: self._mean(name, kept) for name, kept in otherwise.items()}

    def _mean(self, name: str, kept: Tensor) -> Tensor:
        if name not in self.sums:
            return kept
        sums, counts = corner(self.sums[name], kept.shape), _held(self.counts[name], kept.shape)
        mean = torch.where(counts > 0, sums / counts, kept.double())
        return (mean if kept.is_floating_point() else mean.round()).to(kept.dtype)


def _held(counts: Tensor, shape: Iterable[int]) -> Tensor:
    return corner(counts, shape) if counts.dim() else counts
