"""Plans of private runs: noise left in the model, against matrices; options, against what runs account for."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.linalg import toeplitz

from fedhen.cli import main
from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.privacy.accounting import default_delta
from fedhen.privacy.bands import band_coefficients, sum_noise
from fedhen.privacy.choose import make_accountant
from fedhen.privacy.planning import (
    Option,
    Plan,
    Reference,
    count_needed_devices,
    find_least_noise,
    judge,
    list_accountants,
    list_options,
    make_option,
    read_reference,
)
from support.cli import refused

PLAN = Plan(1000, 100, 40, 5e-4)


@pytest.mark.parametrize(("bands", "rounds"), [(1, 40), (3, 3), (4, 30), (10, 7)])
def test_the_noise_in_the_sum_of_rounds(bands: int, rounds: int) -> None:
    """A·C⁻¹ with A the matrix of prefix sums: the root mean square norm of its rows."""
    column = [*band_coefficients(bands), *[0.0] * rounds][:rounds]
    factor = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(toeplitz(column, np.zeros(rounds)))
    assert sum_noise(bands, rounds) == pytest.approx(math.sqrt((factor**2).sum() / rounds))


def test_independent_noise_adds_up_like_a_random_walk() -> None:
    """Variances 1, 2, ..., T have the mean (T + 1) / 2."""
    assert sum_noise(1, 40) == pytest.approx(math.sqrt(41 / 2))


def apply(settings: object) -> Config:
    """Returns the configuration of a run of the plan with these settings."""
    assert isinstance(settings, dict)
    base = replace(Config(), rounds=PLAN.rounds, devices=replace(Config().devices, number=1000, active=100))
    changes = ["privacy.mechanism=central", "privacy.bound=1", f"privacy.delta={PLAN.delta}"]
    return toml.apply_settings(base, [*changes, *(f"{key}={value}" for key, value in settings.items())])


@pytest.mark.slow
def test_each_option_has_the_epsilon_that_a_run_with_its_settings_records() -> None:
    """And a hundredth less noise would be too little."""
    options = list_options(PLAN, epsilon=2.0)
    separations = [dict(option.settings).get("privacy.separation", 1) for option in options]
    assert separations[-2:] == [1, 10] and len(options) >= 3
    for option in options:
        accountant = replace(make_accountant(apply(option.settings)), noise=option.accountant.noise)
        assert accountant == option.accountant
        assert accountant.epsilon([40]) == option.epsilon <= 2.0
        assert replace(accountant, noise=0.98 * accountant.noise).epsilon([40]) > 2.0


def test_banded_noise_leaves_less_in_the_model_than_full_participation() -> None:
    """In the paper's setting, ε = 8, δ = 1e-3: 41 bounds in the sum of the changes, and 340 without a separation."""
    *_, full, banded = list_options(Plan(100, 10, 1000, 1e-3), noise=13.6)
    assert (full.settings.get("privacy.separation"), banded.settings["privacy.separation"]) == (None, 10)
    assert banded.epsilon < full.epsilon and banded.model_noise < full.model_noise


REFERENCE = Reference("a test", {0.0: {"simple": [95.0, 97.0]}, 0.1: {"simple": [88.0, 90.0]}, 0.4: {"simple": [60.0]}})


def test_the_range_of_accuracies_is_that_of_the_rows_around_a_noise() -> None:
    assert REFERENCE.find_ranges(0.0) == {"simple": (95.0, 97.0)}
    assert REFERENCE.find_ranges(0.05) == {"simple": (88.0, 97.0)}
    assert REFERENCE.find_ranges(0.4) == {"simple": (60.0, 60.0)}
    assert REFERENCE.find_ranges(5.0) == {"simple": (0.0, 60.0)}
    assert REFERENCE.most_noise == 0.1, "96 - 89 is less than 10 points, and 96 - 60 is more"


def test_the_measured_table_is_whole() -> None:
    rows = read_reference().rows
    assert min(rows) == 0.0 and [*rows] == sorted(rows) and len(rows) >= 5
    assert all(row.keys() == {"simple", "complex"} for row in rows.values())
    assert 0.0 < read_reference().most_noise < max(rows)
    assert [judge(noise) for noise in (0.0, 10.0)] == ["enough", "too small"]


def test_as_many_devices_as_are_said_to_be_needed_are_enough() -> None:
    """With a tenth of them active, and no closer than the two digits to which the number is rounded."""

    def find_banded(devices: int) -> Option:
        plan = Plan(devices, devices // 10, 40, default_delta(devices))
        (settings, accountant), *_ = [each for each in list_accountants(plan) if each[1].separation > 1]
        noise = find_least_noise(8.0, accountant, 40)
        return make_option(plan, settings, replace(accountant, noise=noise))

    needed = count_needed_devices(Plan(20, 2, 40, 0.01), find_banded(20), 8.0)
    most = read_reference().most_noise
    assert find_banded(needed).model_noise <= most < find_banded(needed // 2).model_noise
    assert (
        count_needed_devices(Plan(needed, needed // 10, 40, default_delta(needed)), find_banded(needed), 8.0) == needed
    )


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["privacy", "--devices", "20", "--active", "10", "--rounds", "40"]
    assert main([*asked, "--noise", "1.2", "--delta", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "This fleet is too small" in said and "a device's data may be given away whole" in said
    assert "devices.sampling=uniform privacy.separation=2" in said
    assert main([*asked, "--noise", "1.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fleet"] == "too small" and found["devices_needed"] > 20 and found["delta"] == 0.01
    assert all(option["noise"] == 1.2 for option in found["options"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--devices", "5"], "--active 10 is more than --devices 5"),
        (["--rounds", "0"], "--rounds 0: it must be at least 1"),
        (["--noise", "-1"], "--noise -1: it must be above 0"),
        (["--noise", "nan"], "--noise nan: it must be above 0"),
        (["--delta", "1"], "--delta 1: it must be below 1"),
        (["--epsilon", "2"], "not allowed with"),
    ],
)
def test_wrong_plans(change: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(
        capsys, "privacy", "--devices", "20", "--active", "10", "--rounds", "4", "--noise", "1", *change
    )
