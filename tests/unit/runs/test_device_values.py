"""The spread of a metric over devices, each figure worked out by hand."""

from __future__ import annotations

import pytest

from fedhen.runs.device_values import describe_owners, describe_spread
from fedhen.runs.records import ACCURACY, MetricInfo


def test_a_spread_by_hand() -> None:
    """Eleven values 0, .1, ..., 1: mean .5, variance 1/10, a tenth is two devices, rounded up."""
    spread = describe_spread([k / 10 for k in range(11)], ACCURACY)
    assert spread is not None and spread.devices == 11 and spread.hurt is None
    assert spread.mean == pytest.approx(0.5)
    assert spread.deviation == pytest.approx(0.1**0.5)
    assert spread.worst_tenth == pytest.approx(0.05)
    assert spread.best_tenth == pytest.approx(0.95)


def test_devices_without_test_data_do_not_count() -> None:
    """Of three devices with both values one is worse than the server's model; a tie does not hurt."""
    spread = describe_spread([0.5, None, 0.2, 0.9, 0.4], ACCURACY, server=[0.5, 0.1, 0.3, 0.8, None])
    assert spread is not None and spread.devices == 4
    assert spread.hurt == pytest.approx(1 / 3)
    assert describe_spread([None, None], ACCURACY) is None


def test_lower_may_be_better() -> None:
    error = MetricInfo("rmse", "", "lower")
    spread = describe_spread([1.0, 3.0], error, server=[2.0, 2.0])
    assert spread is not None and (spread.worst_tenth, spread.best_tenth, spread.hurt) == (3.0, 1.0, 0.5)


def test_owners_are_compared_with_the_server_on_the_same_devices() -> None:
    found = describe_owners({"server": {"simple": [0.5, 0.5]}, "personal": {"simple": [0.6, 0.4]}}, ACCURACY)
    assert found["server"]["simple"].hurt is None
    assert found["personal"]["simple"].hurt == 0.5
