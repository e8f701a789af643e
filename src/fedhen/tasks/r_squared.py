"""R², from sums that are exact: Σy² − (Σy)²/n loses all its digits in floating point if the targets are far from 0."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

EXPONENTS = range(1008, -313, -24)
"""A number is the sum of its digits times 2^exponent. A digit is below 2^24: 2^29 of them add up exactly."""
SPLIT = 2.0**27 + 1


def r2_sums(output: Tensor, targets: Tensor) -> Tensor:
    """Returns, for each output, n, Σ(y − z)², and the sums of the digits of y and of y²."""
    y = targets.double().flatten(1) if targets.dim() > 1 else targets.double()[:, None]
    z = output.double().reshape(y.shape)
    # Dekker's split: the halves of y have 26 bits, and their products are exact.
    high = SPLIT * y - (SPLIT * y - y)
    low = y - high
    squares = torch.cat([high * high, 2 * high * low, low * low])
    count = torch.full_like(y[:1], len(y))
    return torch.cat([count, (y - z).square().sum(0, keepdim=True), _digits(y), _digits(squares)]).flatten()


def r2(sums: Tensor) -> float:
    """Returns the mean over the outputs of 1 − Σ(y − z)² / Σ(y − mean)²."""
    columns = sums.view(2 + 2 * len(EXPONENTS), -1).T.tolist()
    return sum(map(_r2_of_one, columns)) / len(columns)


def _r2_of_one(column: list[float]) -> float:
    count, errors, *digits = column
    if not all(map(math.isfinite, column)) or not count:
        return math.nan
    total, squares = (_add(digits[k : k + len(EXPONENTS)]) for k in (0, len(EXPONENTS)))
    spread = float(squares - total**2 / int(count))
    return 1 - errors / spread if spread else math.nan


def _digits(values: Tensor) -> Tensor:
    """Returns the sums over the first dimension, one for each exponent."""
    found, rest = [], values
    for exponent in EXPONENTS:
        digit = torch.trunc(rest * 2.0**-exponent)
        rest = rest - digit * 2.0**exponent
        found.append(digit.sum(0))
    return torch.stack(found)


def _add(digits: list[float]) -> Fraction:
    return sum((int(digit) * Fraction(2) ** e for digit, e in zip(digits, EXPONENTS, strict=True)), Fraction(0))
