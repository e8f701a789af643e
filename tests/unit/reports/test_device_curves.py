"""The chart of the devices' own scores: whose curve has which name, and what its points are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedhen.reports import compare
from fedhen.reports.comparison import Comparison
from fedhen.reports.own_data import Distribution
from fedhen.runs.reader import Run
from fedhen.runs.records import DeviceValues
from support.report_fixtures import make_run


def make_scored(method: str, own: DeviceValues) -> Run:
    run = make_run(method, {"simple": [0.5], "complex": [0.5]})
    return replace(run, rounds=[replace(run.rounds[0], own=own)])


def compare_two() -> Comparison:
    """A method of two owners, and one whose devices alone have models. Each owner's devices have one value."""
    both: DeviceValues = {
        "server": {"simple": [0.3, 0.3], "complex": [0.4]},
        "local": {"simple": [0.1, 0.1], "complex": [0.2]},
    }
    own: DeviceValues = {"personal": {"simple": [0.9, 0.7], "complex": [None]}}
    return compare([make_scored("fedhen", both), make_scored("fedhen+fedper", own)])


def test_every_curve_has_the_values_of_its_name() -> None:
    """Only owners that a method has get a curve; a plot may have an empty one, as all plots share a legend."""
    simple, complex_ = Distribution(compare_two()).plots
    found = {curve.name: curve.line.mean for curve in simple.curves}
    expected = {
        "fedhen: server’s model": (30.0, 30.0),
        "fedhen: trained alone": (10.0, 10.0),
        "fedhen+fedper: personal model": (70.0, 90.0),
    }
    assert {name: (values[0], values[-1]) for name, values in found.items()} == {
        name: pytest.approx(ends) for name, ends in expected.items()
    }
    assert [curve.name for curve in complex_.curves] == list(expected)
    assert {curve.name: curve.line.mean[:1] for curve in complex_.curves} == {
        "fedhen: server’s model": [pytest.approx(40.0)],
        "fedhen: trained alone": [pytest.approx(20.0)],
        "fedhen+fedper: personal model": [],
    }
    assert len({curve.look for curve in simple.curves}) == 3
