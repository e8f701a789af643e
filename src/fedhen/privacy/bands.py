"""Banded noise as numbers: the matrix C, what a participation changes in it, and how much noise is left in the model.

C is lower triangular and Toeplitz. The noise of the rounds is C⁻¹Z with independent Z, so rounds take back part of the
noise before them. One band, b = 1, is independent noise.
"""

from __future__ import annotations

import math


def band_coefficients(bands: int) -> list[float]:
    """Returns c_0 to c_{b-1} of the lower triangular Toeplitz matrix C, c_k = binomial(2k, k) / 4^k.

    C is the square root of the matrix of prefix sums, cut to b bands (Choquette-Choo et al. 2023).
    """
    found = [1.0]
    for k in range(1, bands):
        found.append(found[-1] * (2 * k - 1) / (2 * k))
    return found


def band_norm(bands: int) -> float:
    """Returns ‖c‖: by how much one participation changes C times the sums, in units of the bound."""
    return math.sqrt(math.fsum(c * c for c in band_coefficients(bands)))


def sum_noise(bands: int, rounds: int) -> float:
    """Returns the deviation of the noise in the sum of all rounds so far, as its root mean square over the rounds.

    In units of the deviation of Z: row t of the matrix of prefix sums times C⁻¹ has the squares of its first t numbers.
    """
    c = band_coefficients(min(bands, rounds))
    inverse: list[float] = []
    for t in range(rounds):
        inverse.append(float(t == 0) - math.fsum(c[k] * inverse[t - k] for k in range(1, min(t + 1, len(c)))))
    total = prefix = square = 0.0
    for number in inverse:
        prefix += number
        square += prefix * prefix
        total += square
    return math.sqrt(total / rounds)
