"""Bounded updates, worked out by hand on models of two numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedhen.algorithm.merging import merge, share_common_weights
from fedhen.algorithm.updates import Update
from fedhen.config.training_settings import ServerConfig
from fedhen.params import TierModels, Weights
from fedhen.privacy.bounded import BoundedUpdates


def weights(**values: float) -> Weights:
    return {name: torch.tensor([value]) for name, value in values.items()}


def update(device: int, tier: str, **values: float) -> Update:
    return Update(device, tier, weights(**values), frozenset(values), samples=1, loss=0.0)


def step(mechanism: BoundedUpdates, updates: list[Update], server: TierModels) -> TierModels:
    return merge(server, updates, share_common_weights, mechanism.begin(1, server, updates)).models


def server() -> TierModels:
    a = torch.tensor([100.0])
    return {"simple": {"a": a}, "complex": {"a": a, "b": torch.tensor([200.0])}}


UPDATES = [update(0, "simple", a=101.0), update(1, "complex", a=103.0, b=204.0), update(2, "complex", a=100.0, b=210.0)]


def test_a_change_is_one_vector_over_all_blocks() -> None:
    """Bound 5. Changes are (1), (3, 4) with norm 5 and (0, 10), which becomes (0, 5).

    a = 100 + (1 + 3 + 0) / 3, b = 200 + (4 + 5) / 2.
    """
    after = step(BoundedUpdates(ServerConfig(), fixed=5.0), UPDATES, server())
    assert after["simple"]["a"].item() == pytest.approx(100 + 4 / 3)
    assert after["complex"]["b"].item() == pytest.approx(204.5)


def test_the_median_of_the_norms() -> None:
    """Norms are 1, 5, 10: the median is 5, so the result is the same, and the record says it."""
    mechanism = BoundedUpdates(ServerConfig())
    after = step(mechanism, UPDATES, server())
    assert after["complex"]["b"].item() == pytest.approx(204.5)
    assert mechanism.publish({"round": 1}) == ({"round": 1, "bound": 5.0}, {})


def test_of_two_devices_the_smaller_norm_bounds_both() -> None:
    """Changes (1) and (0, 10): the lower median is 1, so b = 200 + 1."""
    after = step(BoundedUpdates(ServerConfig()), [UPDATES[0], UPDATES[2]], server())
    assert after["complex"]["b"].item() == pytest.approx(201.0)


def test_nobody_returned() -> None:
    mechanism = BoundedUpdates(ServerConfig())
    assert step(mechanism, [], server()) == server()
    assert mechanism.publish({"round": 1}) == ({"round": 1}, {})


def test_enormous_finite_weights_move_the_model_by_the_bound() -> None:
    """3e38 is finite in float32; its change has length 5 after all, in direction (1, 1)/√2, averaged with (0, 0)."""
    huge = [update(0, "complex", a=3e38, b=3e38), update(1, "complex", a=100.0, b=200.0)]
    after = step(BoundedUpdates(ServerConfig(), fixed=5.0), huge, server())
    assert after["complex"]["a"].item() == pytest.approx(100 + 5 / math.sqrt(2) / 2)


def test_a_norm_that_overflows_becomes_no_change() -> None:
    """1e200² is no float64, so the norm is infinite and the device contributes 0."""
    start: TierModels = {"only": {"a": torch.tensor([1.0], dtype=torch.float64)}}
    bad = Update(0, "only", {"a": torch.tensor([1e200], dtype=torch.float64)}, frozenset("a"), 1, 0.0)
    assert step(BoundedUpdates(ServerConfig(), fixed=5.0), [bad], start)["only"]["a"].item() == 1.0


def test_counters_are_no_part_of_the_norm() -> None:
    """A count of batches grows by 1000 and keeps that; the weight's change of 3 is within the bound."""
    start: TierModels = {"only": {"a": torch.tensor([1.0]), "count": torch.tensor([7])}}
    trained = Update(0, "only", {"a": torch.tensor([4.0]), "count": torch.tensor([1007])}, frozenset("a"), 1, 0.0)
    after = step(BoundedUpdates(ServerConfig(), fixed=5.0), [trained], start)["only"]
    assert (after["a"].item(), after["count"].item()) == (4.0, 1007)


def test_only_rows_that_count_are_in_the_norm() -> None:
    """Row 1 does not count, so its change of 100 neither enters nor shortens the change of row 0."""
    start: TierModels = {"only": {"w": torch.zeros(2, 1)}}
    trained = replace(
        Update(0, "only", {"w": torch.tensor([[3.0], [100.0]])}, frozenset("w"), 1, 0.0),
        rows={"w": torch.tensor([True, False])},
    )
    after = step(BoundedUpdates(ServerConfig(), fixed=5.0), [trained], start)["only"]["w"]
    assert after.flatten().tolist() == [3.0, 0.0]


def test_weights_by_samples_count_after_the_bound() -> None:
    """Changes 1 and 10, bound 5, samples 1 and 3: a = 100 + (1·1 + 3·5) / 4."""
    both = [update(0, "simple", a=101.0), replace(update(1, "simple", a=110.0), samples=3)]
    after = step(BoundedUpdates(ServerConfig(weighting="samples"), fixed=5.0), both, server())
    assert after["simple"]["a"].item() == pytest.approx(104.0)
