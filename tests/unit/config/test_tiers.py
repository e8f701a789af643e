"""Tiers as shares, as counts of devices, or as a list with the tier of each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedhen.algorithm.methods import FEDAVG
from fedhen.config import toml
from fedhen.config.recipes import digits_4
from fedhen.config.settings import Config
from fedhen.config.validation import from_mapping
from fedhen.errors import FedhenError
from support.marks import first_is_quick

MIXED = ["simple", "complex", "complex", "simple", "complex", "complex", "complex"]


def make(tiers: Any, number: int) -> Config:
    return from_mapping({"tiers": tiers, "devices": {"number": number, "active": 1}})


@pytest.mark.parametrize(
    ("tiers", "number", "expected"),
    [
        ({"simple": 0.5, "complex": 0.5}, 4, ["simple"] * 2 + ["complex"] * 2),
        ({"simple": 1}, 3, ["simple"] * 3),
        ({"simple": 1, "complex": 1}, 2, ["simple", "complex"]),
        ({"simple": 3, "complex": 7}, 10, ["simple"] * 3 + ["complex"] * 7),
        ({"simple": 2}, 2, ["simple"] * 2),
        (MIXED, 7, MIXED),
        (("complex", "complex"), 2, ["complex"] * 2),
    ],
)
def test_shares_counts_and_lists_give_each_device_its_tier(tiers: Any, number: int, expected: list[str]) -> None:
    config = make(tiers, number)
    assert config.tier_of_devices() == expected
    assert config.tier_sizes() == {tier: expected.count(tier) for tier in ("simple", "complex") if tier in expected}
    assert sum(config.tiers.values()) == pytest.approx(1)
    assert toml.parse_toml(toml.to_toml(config)) == config


@pytest.mark.parametrize("numbers", first_is_quick([range(2, 20), range(20, 200)]))
def test_every_count_is_kept_exactly(numbers: range) -> None:
    """Counts become shares, whose sums are rounded."""
    for number in numbers:
        for simple in range(1, number):
            counts = {"simple": simple, "complex": number - simple}
            assert make(counts, number).tier_sizes() == counts


def test_files_and_options_may_have_counts_and_lists(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(f"tiers = {MIXED}\n[devices]\nnumber = 7\nactive = 2\n")
    assert toml.read_toml(path).tier_of_devices() == MIXED
    path.write_text("[tiers]\nsimple = 3\ncomplex = 4\n[devices]\nnumber = 7\nactive = 2\n")
    assert toml.read_toml(path).tier_sizes() == {"simple": 3, "complex": 4}
    small = ["devices.active=2", "devices.number=7"]
    assert toml.apply_settings(Config(), [*small, f"tiers={MIXED}"]).tier_of_devices() == MIXED
    assert toml.apply_settings(Config(), [*small, "tiers={simple=6, complex=1}"]).tier_sizes()["simple"] == 6
    listed = toml.apply_settings(
        digits_4(), ["devices.number=6", "tiers=['large', 'tiny', 'tiny', 'small', 'tiny', 'tiny']"]
    )
    assert list(listed.tiers) == ["tiny", "small", "large"], "shallowest first, whichever device comes first"


@pytest.mark.parametrize(
    ("tiers", "says"),
    [
        ({"simple": 3, "complex": 4}, "tiers counts 7 devices, and devices.number=5: they must agree"),
        (["simple"] * 4, "tiers lists 4 devices, and devices.number=5: they must agree"),
        (["simple", "complx", "simple", "simple", "simple"], "unknown tier in tiers 'complx': did you mean 'complex'?"),
        ([1, 2, 3, 4, 5], "unknown tier in tiers '1'"),
        ([["simple"]] * 5, "unknown tier in tiers"),
        (
            {"simple": 1.5, "complex": 3.5},
            "the shares in tiers add up to 5: they must add up to 1, or count the devices",
        ),
        ({"simple": 5, "complex": 0}, "tiers needs at least one tier, and every tier a share above 0"),
        ("simple", "tiers must be a table, found a string"),
        ([], "tiers lists 0 devices"),
    ],
)
def test_tiers_that_do_not_fit_are_one_line(tiers: Any, says: str) -> None:
    with pytest.raises(FedhenError) as error:
        make(tiers, 5)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_other_devices_need_another_list() -> None:
    with pytest.raises(
        FedhenError, match=r"devices\.tiers has 2 simple, 5 complex, but tiers and devices\.number make 3"
    ):
        from_mapping({"devices": {"number": 9}}, make(MIXED, 7))


def test_a_method_with_one_tier_gives_it_to_all_devices() -> None:
    assert FEDAVG.keep_tiers(make(MIXED, 7)).tier_of_devices() == ["complex"] * 7
