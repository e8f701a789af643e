"""Accounting: the ε of differential privacy that a number of noisy sums has spent. Needs neither torch nor numpy.

All bounds here are upper bounds. The neighbours are runs in which the data of one device is replaced by none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fedhen.errors import ConfigError

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
"""Orders of Rényi's divergence that are tried. Whole numbers have a closed form."""
LARGEST_NOISE = 1e6
"""Up to which noise is searched."""
LARGEST_DELTA = 0.01
"""The default δ of small fleets."""


@dataclass(frozen=True)
class Accountant:
    """The ε of a run, as a function of how many noisy sums it has released.

    Example: `Accountant(noise=1.0, delta=1e-3, rate=0.1).epsilon([60])` is the ε of 60 rounds with Poisson sampling.
    """

    noise: float
    """z, the deviation of the noise in units of what one participation can change."""
    delta: float
    rate: float = 1.0
    """q, the probability with which each device takes part, independently of the others; 1: no amplification."""
    separation: int = 1
    """b: a device takes part at most once in any b rounds in a row."""
    is_exact: bool = False
    """Whether dp-accounting's privacy loss distributions are used, which are tight."""

    def epsilon(self, releases: Sequence[int]) -> float:
        """Returns ε after streams of noise with these numbers of releases. Infinite without noise."""
        if not sum(releases):
            return 0.0
        if not self.noise:
            return math.inf
        if self.rate < 1:
            sampled = self.rate, self.noise, sum(releases), self.delta
            return float(tight_poisson_epsilon(*sampled) if self.is_exact else poisson_epsilon(*sampled))
        participations = sum(math.ceil(number / self.separation) for number in releases)
        return gaussian_epsilon(math.sqrt(participations) / self.noise, self.delta)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Returns δ of the Gaussian mechanism, μ = sensitivity / deviation (Balle and Wang 2018, Theorem 8)."""
    above, below = _normal(mu / 2 - epsilon / mu), _normal(-mu / 2 - epsilon / mu)
    return above - (math.exp(epsilon + math.log(below)) if below > 0 else 0.0)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns ε of the Gaussian mechanism: exact up to the last digits, rounded upwards."""
    return _smallest(lambda epsilon: gaussian_delta(epsilon, mu) <= delta, 1.0)


def poisson_epsilon(rate: float, noise: float, releases: int, delta: float) -> float:
    """Returns ε of Poisson-sampled Gaussian sums by Rényi's divergence (Canonne, Kamath and Steinke 2020, Prop. 12).

    Where that is worse than without sampling, which never makes ε smaller, returns the latter.
    """
    bounds = (
        releases * divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        for order, divergence in zip(ORDERS, _divergences(rate, noise), strict=True)
    )
    unsampled = gaussian_epsilon(math.sqrt(releases) / noise, delta)
    return float(min(max(0.0, min(bounds)), unsampled))


@cache
def _divergences(rate: float, noise: float) -> tuple[float, ...]:
    return tuple(renyi_divergence(rate, noise, order) for order in ORDERS)


def renyi_divergence(rate: float, noise: float, order: int) -> float:
    """Returns the divergence of one Poisson-sampled Gaussian sum, for whole orders (Mironov et al. 2019, Sec. 3.3)."""
    if rate == 1:
        return order / (2 * noise * noise)
    logs = [
        math.lgamma(order + 1)
        - math.lgamma(k + 1)
        - math.lgamma(order - k + 1)
        + k * math.log(rate)
        + (order - k) * math.log1p(-rate)
        + k * (k - 1) / (2 * noise * noise)
        for k in range(order + 1)
    ]
    largest = max(logs)
    return (largest + math.log(math.fsum(math.exp(each - largest) for each in logs))) / (order - 1)


@cache
def tight_poisson_epsilon(rate: float, noise: float, releases: int, delta: float) -> float:
    """Returns the same from dp-accounting's privacy loss distributions, which takes 0.05 to 4 seconds."""
    try:
        from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
        from dp_accounting.pld import PLDAccountant
    except ImportError:
        raise ConfigError("privacy.accountant=pld needs dp-accounting: pip install 'fedhen[dp]'") from None
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), releases)
    return float(accountant.get_epsilon(delta))


def find_noise(target: float, accountant: Accountant, releases: Sequence[int]) -> float:
    """Returns the smallest noise with which the ε of these releases is at most the target."""

    def is_enough(noise: float) -> bool:
        return noise > 0 and replace(accountant, noise=noise).epsilon(releases) <= target

    if not is_enough(LARGEST_NOISE):
        raise ConfigError(f"no noise reaches ε = {target:g}: choose a larger one, or a larger δ")
    return _smallest(is_enough, 1.0)


def default_delta(devices: int) -> float:
    """Returns δ = 1/N^1.1, less than one device in N, and at most 0.01."""
    return min(LARGEST_DELTA, math.pow(devices, -1.1))


def _smallest(is_enough: Callable[[float], bool], start: float) -> float:
    """Returns the smallest value that is enough, rounded upwards. What is above an enough value is enough too."""
    low, high = 0.0, start
    while not is_enough(high):
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _normal(x: float) -> float:
    """Returns the probability that a standard normal number is at most x."""
    return math.erfc(-x / math.sqrt(2)) / 2
