"""The noise of differential privacy: normal numbers from a key, in whole steps, independent or banded over rounds."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedhen import seeds
from fedhen.privacy.bands import band_coefficients

STEPS = 2.0**32
"""Steps in the bound. Changes and noise are whole numbers of steps, so that sums are exact, and the last digits of a
noisy sum tell nothing (Mironov 2012): rounding the noise is the same as rounding the noisy sum."""


@dataclass(frozen=True)
class NoiseSource:
    """Where the keys of the noise come from."""

    draw_key: Callable[[int], bytes]
    """Release, from 1 -> the key of its noise."""
    is_fresh: bool
    """Whether nobody can compute a key again. Then a round that is played again is another release."""


def make_seeded_source(root: seeds.Root) -> NoiseSource:
    """Returns keys that follow from the seed or the secret: for simulations, whose noise can be repeated."""
    return NoiseSource(lambda release: seeds.stream(root, "privacy noise", release).bytes(32), is_fresh=False)


FRESH_NOISE = NoiseSource(lambda release: secrets.token_bytes(32), is_fresh=True)
"""Keys from the operating system, each used once: for fleets."""


def draw_normal(key: bytes, label: str, shape: Sequence[int]) -> Tensor:
    """Returns independent standard normal numbers in float64: SHAKE-256 of key and label, then Box and Muller."""
    count = math.prod(shape)
    pairs = (count + 1) // 2
    random = hashlib.shake_256(key + label.encode()).digest(16 * pairs)
    # 53 bits each, in (0, 1], so that the logarithm is finite.
    uniform = ((np.frombuffer(random, "<u8") >> np.uint64(11)).astype(np.float64) + 1) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * np.pi * uniform[pairs:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return torch.from_numpy(normal).reshape(tuple(shape))


def correlate(fresh: Tensor, past: Sequence[Tensor]) -> Tensor:
    """Returns the noise of a round, a row of C⁻¹Z, in whole steps.

    Args:
        fresh: The row of Z, in steps.
        past: The noise of the rounds before, the last one first; at most b - 1.
    """
    coefficients = band_coefficients(len(past) + 1)
    for c, noise in zip(coefficients[1:], past, strict=True):
        fresh = fresh - c * noise
    return fresh.round()
