"""Central differential privacy: by hand on models of two numbers, and as properties over random nests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedhen.algorithm.merging import keep_tiers_apart, share_common_weights
from fedhen.algorithm.updates import Update
from fedhen.config.training_settings import ServerConfig
from fedhen.params import Average, TierModels, Weights, overlay, shapes_of, take_corner
from fedhen.privacy.bands import band_coefficients, band_norm
from fedhen.privacy.central import SMALLEST_BOUND, WITHIN
from fedhen.privacy.noise import STEPS, draw_normal
from support.private_rounds import make_central, make_update, nested, play

HOLDERS = {"simple": 6, "complex": 4}


def values(server: TierModels) -> dict[str, dict[str, float]]:
    return {tier: {name: tensor.item() for name, tensor in w.items()} for tier, w in server.items()}


def two_numbers() -> tuple[TierModels, list[Update]]:
    """Changes (3, 4) of norm 5 and (0.6) of norm 0.6."""
    server = nested({"a": [1]}, {"b": [1]})
    three, four = torch.tensor([3.0]).double(), torch.tensor([4.0]).double()
    return server, [
        make_update(0, "complex", server["complex"], {"a": three, "b": four}),
        make_update(1, "simple", server["simple"], {"a": torch.tensor([0.6]).double()}),
    ]


def test_denominators_are_those_expected_and_not_those_who_came() -> None:
    """Without noise, S = 1, q = 0.5, 10 devices hold a and 4 hold b.

    (3, 4) becomes (0.6, 0.8): a = (0.6 + 0.6) / (0.5·10), b = 0.8 / (0.5·4).
    """
    server, updates = two_numbers()
    after = values(play(make_central(server, HOLDERS, noise=0.0), server, updates))
    assert after["simple"]["a"] == after["complex"]["a"] == pytest.approx(0.24, abs=1e-8)
    assert after["complex"]["b"] == pytest.approx(0.4, abs=1e-8)


def test_pools_apart_have_denominators_of_their_own() -> None:
    """Decouple: simple a = 0.6 / (0.5·6), complex a = 0.6 / (0.5·4)."""
    server, updates = two_numbers()
    mechanism = make_central(server, HOLDERS, noise=0.0, pools=keep_tiers_apart)
    after = values(play(mechanism, server, updates, keep_tiers_apart))
    assert after["simple"]["a"] == pytest.approx(0.2, abs=1e-8)
    assert after["complex"]["a"] == pytest.approx(0.3, abs=1e-8)


def test_skipped_weights_neither_count_nor_get_noise_where_nobody_trains_them() -> None:
    """Complex devices train b alone, and nobody trains c: a is over 6 holders, and c keeps its bits."""
    server = nested({"a": [1]}, {"b": [1], "c": [3]})
    trained = {"simple": ["a"], "complex": ["b"]}
    mechanism = make_central(
        server, HOLDERS, noise=1.0, rule=ServerConfig(untrained_weights="skip"), contributed=trained
    )
    one = torch.tensor([0.6]).double()
    update = replace(make_update(0, "complex", server["complex"], {"b": one}), trained=frozenset("b"))
    after = play(mechanism, server, [update])
    assert torch.equal(after["complex"]["c"], server["complex"]["c"])
    assert after["complex"]["a"].item() != 0.0
    quiet = make_central(server, HOLDERS, noise=0.0, rule=ServerConfig(untrained_weights="skip"), contributed=trained)
    assert play(quiet, server, [update])["complex"]["b"].item() == pytest.approx(0.6 / (0.5 * 4), abs=1e-6)


# Sensitivity


@st.composite
def nests(draw: st.DrawFn) -> tuple[TierModels, list[Update]]:
    """Two to four tiers nested by depth, width or both, and devices with changes of any size, some not finite."""
    tiers = [f"t{number}" for number in range(draw(st.integers(2, 4)))]
    by_depth, by_width = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    largest = {f"w{number}": (draw(st.integers(1, 6)), draw(st.integers(1, 6))) for number in range(len(tiers))}
    server: TierModels = {}
    for depth, tier in enumerate(tiers, start=1):
        names = list(largest)[:depth] if by_depth else list(largest)
        part = depth / len(tiers) if by_width else 1.0
        server[tier] = {n: torch.zeros([max(1, round(part * size)) for size in largest[n]]) for n in names}
    kind = draw(st.sampled_from([torch.float32, torch.float64]))
    server = {tier: {n: t.to(kind) for n, t in weights.items()} for tier, weights in server.items()}
    updates = []
    for device in range(draw(st.integers(1, 5))):
        tier, size = draw(st.sampled_from(tiers)), 10.0 ** draw(st.integers(-3, 38))
        stream = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        sent = {n: torch.randn(t.shape, generator=stream).to(kind) * size for n, t in server[tier].items()}
        if draw(st.booleans()):
            name = draw(st.sampled_from([*sent]))
            sent[name][0, 0] = draw(st.sampled_from([math.nan, math.inf, -math.inf, 3e38]))
        updates.append(Update(device, tier, sent, frozenset(sent), 1, 0.0))
    return server, updates


@pytest.mark.fuzz
@settings(max_examples=60, deadline=None)
@given(nests(), st.floats(1e-3, 1e3))
def test_one_device_changes_the_sum_by_at_most_the_bound(nest: tuple[TierModels, list[Update]], bound: float) -> None:
    """Jointly over all blocks, and by at most twice that if its change is replaced by the opposite.

    Sums are in steps of S / 2^32 and exact, so S is 2^32 steps, and the norm is compared in whole numbers.
    """
    server, updates = nest
    mechanism = make_central(server, dict.fromkeys(server, 1), bound=bound, noise=0.0)
    averaging = mechanism.begin(1, server, updates)

    def total(of: list[Update]) -> Weights:
        sums = Average(shapes_of(overlay([*server.values()])))
        for update in of:
            sums.add(*averaging.enter(update))
        return sums.sums

    whole = total(updates)
    for device in range(len(updates)):
        without = total([update for update in updates if update.device != device])
        mine = [tensor - without.get(name, torch.zeros_like(tensor)) for name, tensor in whole.items()]
        assert sum(int(step) ** 2 for tensor in mine for step in tensor.flatten().tolist()) <= int(STEPS) ** 2
        assert all(torch.isfinite(tensor).all() and torch.equal(tensor, tensor.round()) for tensor in whole.values())
        opposite = replace(updates[device], weights={n: -t for n, t in updates[device].weights.items()})
        other = total([update if update.device != device else opposite for update in updates])
        twice = [tensor - other.get(name, torch.zeros_like(tensor)) for name, tensor in whole.items()]
        assert sum(int(step) ** 2 for tensor in twice for step in tensor.flatten().tolist()) <= (2 * int(STEPS)) ** 2


def test_a_device_within_the_bound_keeps_its_change() -> None:
    """Rounded towards 0 to multiples of S / 2^32."""
    server = nested({"a": [3]}, {})
    change = torch.tensor([0.1, -0.2, 0.3]).double()
    mechanism = make_central(server, HOLDERS, noise=0.0, rate=1.0)
    after = play(mechanism, server, [make_update(0, "simple", server["simple"], {"a": change})])
    assert after["simple"]["a"].tolist() == pytest.approx((change / 10).tolist(), abs=2**-32)


# Noise


def residuals(someone: bool) -> dict[str, torch.Tensor]:
    """Returns what a round has added to each block, in units of the deviation zS / (q·N_j) that it should have."""
    server = nested({"a": [40, 50]}, {"b": [30, 100]})
    mechanism = make_central(server, HOLDERS, bound=0.7, noise=2.0, rate=0.3)
    updates = [make_update(0, "complex", server["complex"], {})] if someone else []
    after = play(mechanism, server, updates)["complex"]
    deviation = {"a": 2.0 * 0.7 / (0.3 * 10), "b": 2.0 * 0.7 / (0.3 * 4)}
    return {name: after[name].flatten() / deviation[name] for name in after}


@pytest.mark.parametrize("someone", [False, True])
def test_noise_is_normal_on_each_block_whether_anybody_contributes_or_not(someone: bool) -> None:
    """Kolmogorov and Smirnov's test on 2,000 and 3,000 numbers. The seed is fixed, so the result is."""
    for noise in residuals(someone).values():
        assert stats.kstest(noise.numpy(), "norm").pvalue > 0.01
    assert abs(stats.pearsonr(*(noise[:2000].numpy() for noise in residuals(someone).values())).statistic) < 0.08


def test_pools_and_corners_have_noise_of_their_own() -> None:
    """Kept apart, each tier's `a` has independent noise; by width, a corner and the edge around it have their own."""
    server = nested({"a": [3000]}, {"b": [10]})
    after = play(make_central(server, HOLDERS, noise=2.0, pools=keep_tiers_apart), server, [], keep_tiers_apart)
    one, two = after["simple"]["a"] / (2.0 / (0.5 * 6)), after["complex"]["a"] / (2.0 / (0.5 * 4))
    wide: TierModels = {"simple": {"w": torch.zeros(40, 40).double()}, "complex": {"w": torch.zeros(60, 60).double()}}
    drawn = play(make_central(wide, HOLDERS, noise=2.0), wide, [])["complex"]["w"]
    corner, edge = drawn[:40, :40].flatten() / (2.0 / (0.5 * 10)), drawn[40:].flatten() / (2.0 / (0.5 * 4))
    for noise in (one, two, corner, edge):
        assert stats.kstest(noise.numpy(), "norm").pvalue > 0.01
    assert abs(stats.pearsonr(one.numpy(), two.numpy()).statistic) < 0.06


def test_noise_of_two_rounds_is_independent() -> None:
    """Correlations of 5,000 pairs have deviation 1/√5000 = 0.014."""
    server = nested({"a": [5000]}, {})
    mechanism = make_central(server, HOLDERS)
    first, second = (play(mechanism, server, [])["simple"]["a"].numpy() for _ in range(2))
    assert abs(stats.pearsonr(first, second).statistic) < 0.06


def test_normal_numbers_depend_on_key_and_label_alone() -> None:
    key = bytes(32)
    assert torch.equal(draw_normal(key, "a", (7,)), draw_normal(key, "a", (7,)))
    assert not torch.equal(draw_normal(key, "a", (7,)), draw_normal(key, "b", (7,)))
    assert draw_normal(key, "a", ()).shape == ()
    wide = draw_normal(bytes([1] * 32), "tails", (200_000,)).numpy()
    assert stats.kstest(wide, "norm").pvalue > 0.01 and abs(stats.kurtosis(wide)) < 0.05


def test_band_coefficients() -> None:
    """binomial(2k, k) / 4^k: 1, 1/2, 3/8, 5/16."""
    assert band_coefficients(4) == [math.comb(2 * k, k) / 4**k for k in range(4)]


def test_banded_noise_is_white_after_its_matrix() -> None:
    """C·n is Z with deviation z·‖c‖·S in every row: 12 rounds with b = 4, of 2,000 numbers each."""
    server, rounds, bands = nested({"a": [2000]}, {}), 12, 4
    mechanism = make_central(server, {"simple": 1, "complex": 1}, noise=1.5, rate=0.5, separation=bands)
    noise = torch.stack([play(mechanism, server, [])["simple"]["a"] for _ in range(rounds)])
    c = band_coefficients(bands)
    rows = [torch.stack([c[j] * noise[t - j] for j in range(min(bands, t + 1))]).sum(0) for t in range(rounds)]
    white = torch.stack(rows)
    white = white / (1.5 * band_norm(bands))
    assert stats.kstest(white.flatten().numpy(), "norm").pvalue > 0.01
    correlations = torch.corrcoef(white) - torch.eye(rounds)
    assert correlations.abs().max() < 0.1
    assert torch.corrcoef(noise)[0, 1] < -0.2, "the noise itself is correlated: rounds cancel each other's"
    assert len(mechanism.ledger.past) == bands - 1


def test_the_bound_follows_the_norms() -> None:
    """Without noise: 5 of 5 changes are within the bound, b = (5·½) / (q·N) + ½ = 1, so S·exp(-0.2·(1 - 0.5))."""
    server = nested({"a": [1]}, {})
    mechanism = make_central(server, HOLDERS, bound=2.0, noise=0.0, within=0.5)
    play(mechanism, server, [make_update(device, "simple", server["simple"], {}) for device in range(5)])
    assert mechanism.ledger.bound == pytest.approx(2.0 * math.exp(-0.1))
    far = {"a": torch.tensor([9.0]).double()}
    play(mechanism, server, [make_update(device, "simple", server["simple"], far) for device in range(5)])
    assert mechanism.ledger.bound == pytest.approx(2.0)


def test_a_bound_that_follows_norms_of_zero_does_not_vanish() -> None:
    """Each round divides it by e^0.1: after 500 it would be 2e-22."""
    server = nested({"a": [1]}, {})
    mechanism = make_central(server, HOLDERS, noise=0.0, within=0.5)
    for _ in range(500):
        play(mechanism, server, [make_update(device, "simple", server["simple"], {}) for device in range(5)])
    assert mechanism.ledger.bound == SMALLEST_BOUND


def test_what_a_device_does_not_contribute_is_ignored() -> None:
    """It sends an enormous `c` that is not among the contributed weights: neither its norm nor the model has it."""
    server = nested({"a": [1]}, {"b": [1], "c": [1]})
    change = {"a": torch.tensor([0.6]).double(), "c": torch.tensor([1e30]).double()}
    mechanism = make_central(server, HOLDERS, noise=0.0, contributed={"simple": ["a"], "complex": ["a", "b"]})
    after = values(play(mechanism, server, [make_update(0, "complex", server["complex"], change)]))
    assert after["complex"] == {"a": pytest.approx(0.12, abs=1e-8), "b": 0.0, "c": 0.0}


def test_the_share_within_the_bound_pays_for_itself() -> None:
    """z⁻² = z_Δ⁻² + (2σ_b)⁻²: a device moves the number by a half, with noise of deviation σ_b."""
    mechanism = make_central(nested({"a": [1]}, {}), HOLDERS, noise=3.0, within=0.5)
    weights, number = mechanism.noise_of("simple+complex"), mechanism.noise_of(WITHIN)
    assert weights**-2 + (2 * number) ** -2 == pytest.approx(3.0**-2)


# Account


def test_epsilon_budget_and_what_is_published() -> None:
    server, updates = two_numbers()
    mechanism = make_central(server, HOLDERS, noise=1.0, budget=1.0, model_bytes={"up": {"simple": 10, "complex": 30}})
    assert mechanism.epsilon == 0.0
    rounds = 0
    while not mechanism.ending:
        play(mechanism, server, updates)
        rounds += 1
    assert mechanism.epsilon <= 1.0 < mechanism.accountant.epsilon([rounds + 1])
    record: dict[str, Any] = {"round": 1, "active": [1], "dropped": [], "failed": [1], "loss": 0.5, "bytes": {}}
    public, private = mechanism.publish(record)
    expected = {"simple": 0.5 * 6 * 10, "complex": 0.5 * 4 * 30}
    assert public == {
        **{"round": 1, "active": [], "dropped": [], "loss": None, "bytes": {"up": expected}},
        **{"bound": 1.0, "epsilon": mechanism.epsilon},
    }
    assert private == {"round": 1, "active": [1], "dropped": [], "failed": [1], "bytes": {}}


def test_nested_by_width_divides_corner_by_corner() -> None:
    """A corner that 10 devices hold and an edge that 4 hold: 0.6 / 5 and 0.8 / 2."""
    server: TierModels = {"simple": {"w": torch.zeros(1).double()}, "complex": {"w": torch.zeros(2).double()}}
    change = {"w": torch.tensor([3.0, 4.0]).double()}
    mechanism = make_central(server, HOLDERS, noise=0.0)
    after = play(mechanism, server, [make_update(0, "complex", server["complex"], change)], share_common_weights)
    assert after["complex"]["w"].tolist() == pytest.approx([0.12, 0.4], abs=1e-8)
    assert take_corner(after["complex"]["w"], (1,)).tolist() == after["simple"]["w"].tolist()
