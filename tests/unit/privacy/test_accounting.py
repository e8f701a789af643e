"""The accountant against other libraries, numerical integration, and the properties of every ε."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from fedhen.errors import ConfigError
from fedhen.privacy.accounting import (
    Accountant,
    default_delta,
    find_noise,
    gaussian_delta,
    gaussian_epsilon,
    poisson_epsilon,
    tight_poisson_epsilon,
)
from support.marks import first_is_quick

GRID = [
    (0.1, 1.0, 60, 1e-3),
    (0.1, 1.0, 1000, 1e-5),
    (0.01, 0.8, 200, 1e-5),
    (0.5, 4.0, 40, 1e-2),
    (0.1, 8.0, 1000, 1e-3),
    (0.001, 1.0, 1000, 1e-7),
]
"""Rate, noise, releases, δ."""


@pytest.mark.parametrize(("epsilon", "mu"), [(1.0, 1.0), (3.0, 2.0), (0.1, 0.3), (20.0, 5.0)])
def test_delta_is_the_integral_of_what_one_density_has_above_the_other(epsilon: float, mu: float) -> None:
    """δ = ∫ max(0, p(x) - e^ε·q(x)) dx with p = N(μ, 1) and q = N(0, 1): from ε/μ + μ/2 on, p is above."""
    start = epsilon / mu + mu / 2
    value, _ = integrate.quad(
        lambda x: stats.norm.pdf(x, mu) - math.exp(epsilon) * stats.norm.pdf(x), start, start + 30, epsabs=1e-14
    )
    assert gaussian_delta(epsilon, mu) == pytest.approx(value, rel=1e-6)
    assert gaussian_epsilon(mu, gaussian_delta(epsilon, mu)) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("point", GRID)
def test_own_epsilon_is_above_the_tight_one_and_near_the_librarys(point: tuple[float, float, int, float]) -> None:
    """Google's dp-accounting has more orders, so its bound is a little smaller; its loss distributions are tight."""
    pytest.importorskip("dp_accounting", reason="needs fedhen[dp]")
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    rate, noise, releases, delta = point
    theirs = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    theirs.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), releases)
    own = poisson_epsilon(*point)
    assert theirs.get_epsilon(delta) * (1 - 1e-9) <= own <= 1.1 * theirs.get_epsilon(delta)
    assert tight_poisson_epsilon(*point) <= own


@pytest.mark.slow
def test_gaussian_epsilon_is_that_of_the_library() -> None:
    pytest.importorskip("dp_accounting", reason="needs fedhen[dp]")
    from dp_accounting import GaussianDpEvent, NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    theirs = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    theirs.compose(GaussianDpEvent(4.0), 100)
    own = Accountant(4.0, 1e-5).epsilon([100])
    assert own == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-3)


ACCOUNTANTS = st.builds(
    Accountant,
    noise=st.floats(0.3, 20),
    delta=st.floats(1e-9, 0.1),
    rate=st.one_of(st.just(1.0), st.floats(1e-4, 0.9)),
    separation=st.integers(1, 20),
)


@pytest.mark.fuzz
@settings(max_examples=30, deadline=None)
@given(ACCOUNTANTS, st.integers(1, 500))
def test_epsilon_is_monotone(accountant: Accountant, releases: int) -> None:
    """More noise, a larger δ, fewer releases and a smaller rate never cost more."""
    epsilon, slack = accountant.epsilon([releases]), 1 + 1e-8
    assert epsilon >= 0
    assert replace(accountant, noise=2 * accountant.noise).epsilon([releases]) <= epsilon * slack
    assert replace(accountant, delta=2 * accountant.delta).epsilon([releases]) <= epsilon * slack
    assert accountant.epsilon([releases + 10]) * slack >= epsilon
    assert replace(accountant, rate=accountant.rate / 2, separation=1).epsilon([releases]) <= (
        replace(accountant, separation=1).epsilon([releases]) * slack
    )


def test_participations_are_counted_in_each_stream_of_noise() -> None:
    """With b = 4, streams of 5 and 4 releases allow 2 + 1 participations: μ = √3 / z."""
    accountant = Accountant(2.0, 1e-3, separation=4)
    assert accountant.epsilon([5, 4]) == gaussian_epsilon(math.sqrt(3) / 2, 1e-3)
    assert accountant.epsilon([0, 0]) == 0.0


def test_without_noise_there_is_no_promise() -> None:
    assert Accountant(0.0, 1e-3, rate=0.1).epsilon([1]) == math.inf


@pytest.mark.parametrize("rate", first_is_quick([1.0, 0.1]))
def test_the_noise_of_a_target_has_its_epsilon(rate: float) -> None:
    accountant = Accountant(1.0, 1e-3, rate=rate)
    noise = find_noise(2.0, accountant, [40])
    assert replace(accountant, noise=noise).epsilon([40]) <= 2.0
    assert replace(accountant, noise=0.999 * noise).epsilon([40]) > 2.0


def test_a_target_that_no_noise_reaches() -> None:
    """ε = 1e-9 at δ = 1e-12 needs more noise than is searched for."""
    with pytest.raises(ConfigError, match="choose a larger one"):
        find_noise(1e-9, Accountant(1.0, 1e-12, rate=0.1), [10])


def test_default_delta_is_below_one_device() -> None:
    assert default_delta(1000) == pytest.approx(1 / 1995.26, rel=1e-5)
    assert default_delta(2) == default_delta(1) == 0.01, "1/N^1.1 would be 0.47, or no promise at all"
