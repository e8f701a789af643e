"""The server steps of Alg. 1, 3 and 4, worked out by hand on models of two numbers."""

from __future__ import annotations

import math

import pytest
import torch

from fedhen.algorithm import merging
from fedhen.algorithm.averaging import ByHolder
from fedhen.algorithm.merging import Pools, keep_tiers_apart, share_common_weights
from fedhen.algorithm.updates import Update
from fedhen.config.training_settings import ServerConfig
from fedhen.experiment.reported_models import AllDevicesAverage
from fedhen.params import TierModels, Weights, is_finite


def weights(**values: float) -> Weights:
    return {name: torch.tensor([value]) for name, value in values.items()}


def numbers(server: TierModels) -> dict[str, dict[str, float]]:
    return {tier: {name: tensor.item() for name, tensor in w.items()} for tier, w in server.items()}


def update(device: int, tier: str, samples: int = 1, trained: str = "ab", **values: float) -> Update:
    return Update(device, tier, weights(**values), frozenset(trained), samples, loss=0.0)


def server() -> TierModels:
    a = torch.tensor([100.0])
    return {"simple": {"a": a}, "complex": {"a": a, "b": torch.tensor([200.0])}}


def merge(before: TierModels, updates: list[Update], pools: Pools, rule: ServerConfig) -> TierModels:
    return merging.merge(before, updates, pools, ByHolder(rule)).models


SIMPLE = [update(0, "simple", a=1.0), update(1, "simple", a=3.0, samples=3)]
COMPLEX = [update(2, "complex", a=8.0, b=20.0, samples=4), update(3, "complex", a=12.0, b=40.0, samples=2)]


def test_algorithm_1_and_4() -> None:
    """Line 18: a = (1 + 3 + 8 + 12) / 4 = 6. Line 20: the complex model's a is the same. Line 22: b = (20 + 40) / 2."""
    after = merge(server(), SIMPLE + COMPLEX, share_common_weights, ServerConfig())
    assert numbers(after) == {"simple": {"a": 6.0}, "complex": {"a": 6.0, "b": 30.0}}


def test_algorithm_3() -> None:
    """Each tier by itself: simple a = (1 + 3) / 2, complex a = (8 + 12) / 2 and b = (20 + 40) / 2."""
    after = merge(server(), SIMPLE + COMPLEX, keep_tiers_apart, ServerConfig())
    assert numbers(after) == {"simple": {"a": 2.0}, "complex": {"a": 10.0, "b": 30.0}}


def test_without_complex_devices_their_block_keeps_its_value() -> None:
    """Shared: a = (1 + 3) / 2 for both, b stays 200. Apart: the complex model stays whole."""
    shared = merge(server(), SIMPLE, share_common_weights, ServerConfig())
    assert numbers(shared) == {"simple": {"a": 2.0}, "complex": {"a": 2.0, "b": 200.0}}
    apart = merge(server(), SIMPLE, keep_tiers_apart, ServerConfig())
    assert numbers(apart) == {"simple": {"a": 2.0}, "complex": {"a": 100.0, "b": 200.0}}


def test_without_simple_devices() -> None:
    """Shared: a = (8 + 12) / 2 for both. Apart: the simple model keeps its value."""
    shared = merge(server(), COMPLEX, share_common_weights, ServerConfig())
    assert numbers(shared) == {"simple": {"a": 10.0}, "complex": {"a": 10.0, "b": 30.0}}
    apart = merge(server(), COMPLEX, keep_tiers_apart, ServerConfig())
    assert numbers(apart) == {"simple": {"a": 100.0}, "complex": {"a": 10.0, "b": 30.0}}


def test_without_any_device_all_weights_stay() -> None:
    assert numbers(merge(server(), [], share_common_weights, ServerConfig())) == numbers(server())


def test_weighted_by_samples() -> None:
    """a = (1·1 + 3·3 + 4·8 + 2·12) / 10 = 6.6; b = (4·20 + 2·40) / 6."""
    after = numbers(merge(server(), SIMPLE + COMPLEX, share_common_weights, ServerConfig(weighting="samples")))
    assert after["simple"]["a"] == after["complex"]["a"] == pytest.approx(6.6)
    assert after["complex"]["b"] == pytest.approx(160 / 6)


def test_untrained_weights_can_be_left_out_of_the_average() -> None:
    """Complex devices that do not train a (as NoSide's do not train the exit): a = (1 + 3) / 2 over the simple ones."""
    untrained = [update(2, "complex", trained="b", a=8.0, b=20.0), update(3, "complex", trained="b", a=12.0, b=40.0)]
    averaged = merge(server(), SIMPLE + untrained, share_common_weights, ServerConfig())
    skipped = merge(server(), SIMPLE + untrained, share_common_weights, ServerConfig(untrained_weights="skip"))
    assert numbers(averaged)["simple"]["a"] == 6.0
    assert numbers(skipped) == {"simple": {"a": 2.0}, "complex": {"a": 2.0, "b": 30.0}}


def test_shared_tiers_are_the_same_tensor() -> None:
    """R(w_s, w_c) = 0 by construction, not by luck of rounding."""
    after = merge(server(), SIMPLE + COMPLEX, share_common_weights, ServerConfig())
    assert after["simple"]["a"] is after["complex"]["a"]


def test_three_tiers() -> None:
    """a is held by all: (1 + 2 + 6) / 3; b by two: (4 + 8) / 2; c by one."""
    before: TierModels = {"s": weights(a=0), "m": weights(a=0, b=0), "l": weights(a=0, b=0, c=0)}
    updates = [update(0, "s", a=1), update(1, "m", a=2, b=4), update(2, "l", a=6, b=8, c=9)]
    after = numbers(merge(before, updates, share_common_weights, ServerConfig()))
    assert after == {"s": {"a": 3.0}, "m": {"a": 3.0, "b": 6.0}, "l": {"a": 3.0, "b": 6.0, "c": 9.0}}


def test_average_of_all_devices_last_models() -> None:
    """Simple devices 0, 1, 2, initial a = 100. Device 0 trains twice (1, then 5), device 1 once (3), device 2 never.

    After both rounds: (5 + 3 + 100) / 3 = 36. The complex tier's only device never trained: the initial model.
    """
    last = AllDevicesAverage(server(), ["simple", "simple", "simple", "complex"])
    last.take([update(0, "simple", a=1.0), update(1, "simple", a=3.0)])
    assert last.average("simple")["a"].item() == pytest.approx((1 + 3 + 100) / 3)
    last.take([update(0, "simple", a=5.0)])
    assert last.average("simple")["a"].item() == pytest.approx(36.0)
    assert numbers({"complex": last.average("complex")}) == {"complex": {"a": 100.0, "b": 200.0}}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_weight_anywhere_makes_the_whole_device_bad(bad: float) -> None:
    assert not is_finite(weights(a=1.0, b=bad))
