"""Plans: which class of devices trains what, worked out by hand, and the recipes that they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedhen.algorithm.methods import METHODS
from fedhen.cli.main import main
from fedhen.config import toml
from fedhen.errors import ConfigError
from fedhen.experiment.build import OwnParts
from fedhen.experiment.planning import Plan, make_plan
from fedhen.profiles.profile import Profile
from fedhen.profiles.reading import read_profile
from support.families import two_exits
from support.noise import config, data

CLASS = """
[classes.{name}]
share = 0.5
speed = "{speed} MFLOP/s"
joules = "1 J/GFLOP"
down = "{link} kB/s"
up = "{link} kB/s"
down_joules = "1 J/MB"
up_joules = "2 J/MB"
"""
TWO = CLASS.format(name="slow", speed=0.00168, link=0.424) + CLASS.format(name="fast", speed=0.0168, link=4.24)
"""A device has 8 examples of 6·45 − 2·30 = 210 operations in the simple model, 402 in the complex one.

A slow device takes 1680 / 1680 + 2·424 / 424 = 3 s, or 3216 / 1680 + 2·736 / 424 = 5.386 s; a fast one a tenth of it.
"""


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    (tmp_path / "two.toml").write_text(TWO)
    return read_profile(tmp_path / "two.toml")


def plan(profile: Profile, deadline: float | None) -> Plan:
    return make_plan(config(), METHODS["fedhen"], profile, OwnParts(family=two_exits(), data=data()), deadline)


def test_together_by_hand(profile: Profile) -> None:
    """The slow devices need 3 s for the smallest model; by then the fast ones have trained the largest."""
    found = plan(profile, None)
    slow, fast = found.classes
    assert (slow.device_class.name, slow.devices, fast.devices) == ("slow", 5, 5)
    assert found.deadline == pytest.approx(3)
    assert [slow.seconds(each).total for each in slow.options] == pytest.approx([3, 5.38598], abs=1e-5)
    assert [fast.seconds(each).total for each in fast.options] == pytest.approx([0.3, 0.538598], abs=1e-6)
    assert slow.joules(slow.options[0]).training == pytest.approx(1680e-9)
    assert slow.joules(slow.options[0]).radio == pytest.approx(424e-6 + 2 * 424e-6)
    assert [each.parameters for each in slow.options] == [53, 92]
    assert (slow.candidate.tier, fast.candidate.tier) == ("simple", "complex")
    assert found.config.tiers == {"simple": 0.5, "complex": 0.5} and found.slowest is slow


def test_a_deadline_by_hand(profile: Profile) -> None:
    assert plan(profile, 6.0).config.tiers == {"complex": 1.0}
    assert plan(profile, 6.0).config.clock.deadline_seconds == 6
    late = "a deadline of 2 s cannot be met: a slow device takes 3 s for simple, 1 s too long; raise it, or train less"
    with pytest.raises(ConfigError, match=late):
        plan(profile, 2.0)
    with pytest.raises(ConfigError, match=r"a fast device takes 0\.3 s for simple, 0\.2 s too long; a slow device"):
        plan(profile, 0.1)


def test_a_profile_that_has_tiers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(TWO.replace("share", 'tier = "simple"\nshare'))
    with pytest.raises(ConfigError, match="remove `tier` from its classes"):
        plan(read_profile(path), None)


@pytest.mark.slow
def test_a_plan_for_ones_own_family_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data for four devices decides their number: two slow and two fast ones."""
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text(TWO)
    Path("my.py").write_text(
        "import torch, fedhen\n"
        "from support.families import two_exits\n"
        "FAMILY = two_exits()\n"
        "DATA = fedhen.FederatedData.from_devices([(torch.randn(8, 6), torch.arange(8) % 3) for _ in range(4)])\n"
    )
    own = ["--family", "my.py:FAMILY", "--data", "my.py:DATA", "--profile", "two.toml", "--out", "planned.toml"]
    assert main(["plan", *own, "--quiet", "--set", "training.epochs=1"]) == 0
    planned = toml.read_toml(Path("planned.toml"))
    assert planned.devices.number == 4 and planned.tiers == {"simple": 0.5, "complex": 0.5}
    assert Path(planned.clock.profile) == tmp_path / "two.toml"
    run = ["run", "--config", "planned.toml", *own[:4], "--rounds", "1", "--quiet", "--accelerator", "cpu"]
    assert main([*run, "--run-dir", "run", "--set", "devices.active=4"]) == 0
    # Training the simple model takes 2 s, not 1: at half the speed all have trained the complex one within 8 s. The
    # recipe has no tier of the measured number any more.
    own[-1] = "measured.toml"
    measured = ["--measured", "slow:simple=2", "--deadline", "8"]
    assert main(["plan", *own, *measured, "--quiet", "--set", "training.epochs=1"]) == 0
    planned = toml.read_toml(Path("measured.toml"))
    slow, fast = read_profile(planned.clock.profile).classes
    assert planned.tiers == {"complex": 1.0}
    assert (slow.speed.typical, fast.speed.typical) == pytest.approx((840, 8400))
    run[2] = "measured.toml"
    assert main([*run, "--run-dir", "other", "--set", "devices.active=4"]) == 0


def test_a_plan_reads_data_from_the_folder_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--profile", "phones", "--quiet", "--out", str(tmp_path / "planned.toml")]
    assert main(["plan", "shakespeare", *options, "--data-dir", str(tmp_path / "there")]) == 2
    assert f"{tmp_path / 'there'}/tinyshakespeare/input.txt is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_plans_of_recipes_are_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow phones, 11 of 20, get less than middle ones; a nest by width has its own candidates."""
    monkeypatch.chdir(tmp_path)
    options = ["--profile", "phones", "--quiet", "--out", "planned.toml"]
    assert main(["plan", "digits", *options]) == 0
    text = capsys.readouterr().out
    assert "slow (11 devices)" in text and "play it with: fedhen run --config planned.toml" in text
    planned = toml.read_toml(Path("planned.toml"))
    assert planned.tiers == {"exit-3": 0.55, "complex": 0.45} and planned.model.exits == {"exit-3": 3, "complex": 4}
    assert planned.clock.profile == "phones" and planned.recipe == "digits-on-phones"
    assert main(["plan", "digits", *options]) == 2
    assert "planned.toml exists" in capsys.readouterr().err
    assert main(["plan", "digits", *options, "--overwrite", "--set", "model.nesting=width", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["width-0.125", "simple", "width-0.5", "complex"]
    assert [[each["tier"] for each in of["candidates"]] for of in found["classes"]] == [names, names]
    chosen = [next(each for each in of["candidates"] if each["chosen"]) for of in found["classes"]]
    assert all(each["seconds"]["total"] <= found["deadline_seconds"] for each in chosen)
    assert toml.read_toml(Path("planned.toml")).model.rates == {
        each["tier"]: {"width-0.5": 0.5, "complex": 1.0, "simple": 0.25, "width-0.125": 0.125}[each["tier"]]
        for each in chosen
    }
    assert main(["plan", "digits", *options, "--overwrite", "--deadline", "50 ms"]) == 2
    assert "a deadline of 0.05 s cannot be met: a middle device" in capsys.readouterr().err
    assert main(["plan", "digits", *options, "--overwrite", "--deadline", "5 weeks"]) == 2
    assert "unknown unit in --deadline" in capsys.readouterr().err
