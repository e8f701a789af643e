"""The change that a device has made to its model, as one vector over all weights that it holds, and its norm."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedhen.algorithm.averaging import Contribution
from fedhen.params import Weights


def find_change(contribution: Contribution, received: Mapping[str, Tensor]) -> Weights:
    """Returns the contributed weights minus those that the device received, in float64; 0 in rows that do not count."""
    change = {name: tensor.double() - received[name].double() for name, tensor in contribution.weights.items()}
    for name, rows in contribution.rows.items():
        if name in change:
            change[name][~rows] = 0
    return change


def compute_norm(change: Mapping[str, Tensor]) -> float:
    """Returns ‖δ‖₂ over all of its weights together; infinite if one is not finite or the square is too large."""
    squares = [tensor.square().sum() for tensor in change.values()]
    norm = math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0
    return norm if math.isfinite(norm) else math.inf


def shorten(change: Mapping[str, Tensor], norm: float, bound: float) -> Weights:
    """Returns δ·min(1, S/‖δ‖), whose norm is at most the bound. A change without a finite norm becomes 0."""
    if norm <= bound:
        return dict(change)
    factor = bound / norm
    return {name: tensor * factor if factor else torch.zeros_like(tensor) for name, tensor in change.items()}
