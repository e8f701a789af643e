"""Profiles: what is read and refused, which device is of which class, and what a device-round costs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch

from fedhen import seeds
from fedhen.algorithm.local_training import group_batches
from fedhen.config.settings import Config
from fedhen.data.batches import plan_visits
from fedhen.errors import FedhenError
from fedhen.profiles.device_round import DeviceRound, Parts, count_visits
from fedhen.profiles.profile import Calibration, Profile, draw_jitter
from fedhen.profiles.quantity import Quantity
from fedhen.profiles.reading import list_shipped, parse_measured, read_profile, take_measured
from fedhen.profiles.workload import TrainingPhase, Workload
from fedhen.profiles.writing import write_profile
from fedhen.seeds import DeviceStreams

CLASS = {
    "share": "1.0",
    "speed": '"2 (1 to 4) GFLOP/s"',
    "joules": '"500 (250 to 1000) mJ/GFLOP"',
    "down": '"8 Mbit/s"',
    "up": '"500 kB/s"',
    "down_joules": '"0.2 J/MB"',
    "up_joules": '"200 nJ/bit"',
}


def write(folder: Path, *classes: dict[str, str], more: str = "") -> Path:
    path = folder / "own.toml"
    tables = [f"[classes.c{k}]\n" + "".join(f"{a} = {b}\n" for a, b in each.items()) for k, each in enumerate(classes)]
    path.write_text("\n".join([*tables, more]))
    return path


def test_the_units_of_a_device_round_by_hand(tmp_path: Path) -> None:
    """6 GFLOP, 3 MB down, 1 MB up.

    At 2 GFLOP/s training takes 3 s, at 1 MB/s (8 Mbit/s) the download 3 s, at 0.5 MB/s the upload 2 s. The joules are
    6 · 0.5 = 3 for training, 3 · 0.2 = 0.6 down, and 8e6 bits · 200e-9 = 1.6 up. The range of speeds is 1 to 4 GFLOP/s,
    that of joules 0.25 to 1 a GFLOP.
    """
    (own,) = read_profile(write(tmp_path, CLASS)).classes
    done = DeviceRound(operations=6e9, down=3e6, up=1e6)
    seconds, joules = done.seconds(own), done.joules(own)
    assert (seconds.down, seconds.training, seconds.up) == pytest.approx((3, 3, 2))
    assert (joules.down, joules.training, joules.up) == pytest.approx((0.6, 3, 1.6))
    assert seconds.total == pytest.approx(8) and joules.radio == pytest.approx(2.2)
    assert done.seconds(own, bound="low").training == pytest.approx(1.5)
    assert done.seconds(own, bound="high").training == pytest.approx(6)
    assert done.joules(own, bound="low").training == pytest.approx(1.5)
    assert done.joules(own, bound="high").training == pytest.approx(6)
    assert done.seconds(own, jitter=2.0).total == pytest.approx(16)
    assert Parts(1, 2, 3).plus(Parts(1, 1, 1)) == Parts(2, 3, 4)


@pytest.mark.parametrize("name", list_shipped())
def test_shipped_profiles_can_be_read_and_fit_any_tiers(name: str) -> None:
    profile = read_profile(name)
    speeds = [each.speed.typical for each in profile.classes]
    assert profile.name == name and profile.about and speeds == sorted(speeds)
    tiers = ["tiny"] * 3 + ["small"] * 3 + ["large"] * 4
    assert len(profile.assign(tiers, ["tiny", "small", "large"], seed=0)) == 10


def test_shipped_phones_are_those_of_the_sources() -> None:
    """J/MB = (power(rate) − 2350 mW) · 8 Mbit / rate, with the fits named in the file; the speeds by FLASH's ratios."""
    slow, middle, fast = read_profile("phones").classes
    assert slow.down_joules.typical * 1e6 == pytest.approx((2839 + 11.5 * 30 - 2350) / 1e3 * 8 / 30, rel=0.02)
    assert slow.up_joules.typical * 1e6 == pytest.approx((2926 + 76.7 * 10 - 2350) / 1e3 * 8 / 10, rel=0.02)
    assert slow.up_joules.low * 1e6 == pytest.approx((5664 + 8.88 * 100 - 2350) / 1e3 * 8 / 100, rel=0.02)
    assert slow.up_joules.high * 1e6 == pytest.approx((1288.04 + 438.39 * 6) / 1e3 * 8 / 6, rel=0.01)
    assert slow.down_joules.high * 1e6 == pytest.approx((1288.04 + 51.97 * 13) / 1e3 * 8 / 13, rel=0.01)
    ratio = ((1642 / 179) * (5392 / 561)) ** 0.5
    assert fast.speed.typical / slow.speed.typical == pytest.approx(ratio, rel=0.01)
    assert fast.speed.typical / middle.speed.typical == pytest.approx(((588 / 179) * (1355 / 561)) ** 0.5, rel=0.01)
    assert fast.speed.typical == pytest.approx((6e9 * 82e9) ** 0.5, rel=0.01)
    # GFLOP/J of GoogLeNet and MobileNetV2, with 1.5 and 0.3 G multiplications an image, 6 operations each in training.
    assert 1 / (slow.joules.low * 1e9) == pytest.approx(1.5 * 6 / 0.216, rel=0.02)
    assert 1 / (slow.joules.high * 1e9) == pytest.approx(0.3 * 6 / 0.599, rel=0.02)


def test_shipped_sensors_follow_the_radio_model() -> None:
    """E = b·E_elec + b·d²·E_amp with 50 nJ a bit and 100 pJ a bit and square metre, at 50, 10 and 100 m."""
    (node,) = read_profile("sensors").classes
    for found, distance in ((node.up_joules.typical, 50), (node.up_joules.low, 10), (node.up_joules.high, 100)):
        assert found == pytest.approx(8 * (50e-9 + 100e-12 * distance**2))
    assert node.joules.typical == pytest.approx(24e-3 / node.speed.typical, rel=0.01)


WRONG = {
    "unit": ({**CLASS, "speed": '"2 GFLOPS"'}, "unknown unit in classes.c0.speed 'GFLOPS': did you mean 'GFLOP/s'?"),
    "no unit": ({**CLASS, "speed": '"2"'}, "it has no unit: add one of MFLOP/s, GFLOP/s, TFLOP/s"),
    "other unit": ({**CLASS, "up": '"2 J/MB"'}, "unknown unit in classes.c0.up 'J/MB'"),
    "number": ({**CLASS, "speed": "2"}, 'classes.c0.speed = 2: write a number and a unit, like "22 MFLOP/s"'),
    "negative": ({**CLASS, "down": '"-3 Mbit/s"'}, "it must be above 0"),
    "zero rate": ({**CLASS, "down": '"0 Mbit/s"'}, "it must be above 0"),
    "negative joules": ({**CLASS, "joules": '"-1 J/GFLOP"'}, "it must not be negative"),
    "infinite": ({**CLASS, "speed": '"1e999 GFLOP/s"'}, "it must be a finite number"),
    "range": ({**CLASS, "speed": '"5 (6 to 9) GFLOP/s"'}, "its range must contain it"),
    "share": ({**CLASS, "share": "0.9"}, "the shares of its classes add up to 0.9: they must add up to 1"),
    "share type": ({**CLASS, "share": '"all"'}, "classes.c0.share = 'all': it must be a number from 0 to 1"),
    "availability": ({**CLASS, "availability": "1.5"}, "availability = 1.5: it must be a number from 0 to 1"),
    "key": ({**CLASS, "sped": '"2 GFLOP/s"'}, "unknown key 'classes.c0.sped': did you mean 'classes.c0.speed'?"),
    "missing": ({k: v for k, v in CLASS.items() if k != "up"}, "classes.c0.up is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_class_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    values, expected = WRONG[name]
    with pytest.raises(FedhenError) as raised:
        read_profile(write(tmp_path, values))
    assert expected in str(raised.value) and "\n" not in str(raised.value) and "own.toml" in str(raised.value)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("[profile]\nabout = 3", "profile.about must be a string"),
        ("[clases.x]\n", "unknown key 'clases': did you mean 'classes'?"),
        ("[calibration]\nclass = 'c0'\ntier = 'simple'", "calibration.seconds is missing"),
        ("[calibration]\nclass = 'c0'\ntier = 'simple'\nseconds = '3 d'", "unknown unit in calibration.seconds 'd'"),
        ("[calibration]\nclass = 'no'\ntier = 'simple'\nseconds = '3 s'", "unknown class of profile own 'no'"),
        ("[", "is not TOML"),
    ],
)
def test_other_wrong_parts_are_refused(more: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(FedhenError, match=r"own\.toml") as raised:
        read_profile(write(tmp_path, CLASS, more=more))
    assert expected in str(raised.value)


def test_unknown_profiles_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FedhenError, match=r"did you mean 'phones'\? choose from mixed, phones, sensors"):
        read_profile("phone")
    with pytest.raises(FedhenError, match=r"cannot read .*No such file"):
        read_profile(tmp_path / "none.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(FedhenError, match=r"\[classes\] is missing"):
        read_profile(tmp_path / "empty.toml")


def test_the_slowest_devices_have_the_shallowest_tier() -> None:
    """53 % slow, 46.6 % middle, 0.4 % fast; of 1000 devices the 500 simple ones are slow, 30 complex ones too."""
    tier_of = ["simple", "complex"] * 500
    classes = [each.name for each in read_profile("phones").assign(tier_of, ["simple", "complex"], seed=3)]
    simple, complex_ = classes[0::2], classes[1::2]
    assert [simple.count(name) for name in ("slow", "middle", "fast")] == [500, 0, 0]
    assert [complex_.count(name) for name in ("slow", "middle", "fast")] == [30, 466, 4]
    again = [each.name for each in read_profile("phones").assign(tier_of, ["simple", "complex"], seed=3)]
    other = [each.name for each in read_profile("phones").assign(tier_of, ["simple", "complex"], seed=4)]
    assert again == classes != other


def with_tiers(folder: Path) -> Profile:
    shares = (("0.3", "simple"), ("0.1", "simple"), ("0.6", "complex"))
    return read_profile(write(folder, *({**CLASS, "share": s, "tier": f'"{t}"'} for s, t in shares)))


def test_classes_with_a_tier_share_the_devices_of_that_tier(tmp_path: Path) -> None:
    """Of 8 simple devices 3/4 are of the first class; all complex ones are of the third."""
    classes = with_tiers(tmp_path).assign(["simple"] * 8 + ["complex"] * 2, ["simple", "complex"], seed=0)
    assert sorted(each.name for each in classes[:8]) == ["c0"] * 6 + ["c1"] * 2
    assert [each.name for each in classes[8:]] == ["c2", "c2"]


def test_a_profile_without_a_tier_of_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedhenError, match="profile own has no class of tier 'tiny', only of simple, complex"):
        with_tiers(tmp_path).assign(["tiny"], ["tiny"], seed=0)
    with pytest.raises(FedhenError, match="and c0 has none: give all of them one"):
        read_profile(write(tmp_path, {**CLASS, "share": "0.5"}, {**CLASS, "share": "0.5", "tier": '"simple"'}))


def test_one_measured_number_scales_all_speeds(tmp_path: Path) -> None:
    """8 GFLOP in 2 s are 4 GFLOP/s, twice what the profile says: twice as fast at the same power."""
    more = "[calibration]\nclass = 'c0'\ntier = 'simple'\nseconds = '2 s'"
    profile = read_profile(write(tmp_path, CLASS, more=more)).calibrate({"simple": 8e9})
    (own,) = profile.classes
    assert own.speed.low == own.speed.high == pytest.approx(4e9)
    assert own.joules.typical == pytest.approx(0.25e-9)
    phones = take_measured(read_profile("phones"), parse_measured("slow:simple=310"))
    slow, middle, _ = phones.calibrate({"simple": 4.3e12, "complex": 8.3e12}).classes
    assert DeviceRound(4.3e12, 0, 0).seconds(slow).total == pytest.approx(310)
    assert slow.speed.typical / middle.speed.typical == pytest.approx(2.36 / 7.9)
    assert parse_measured("slow:simple=2 min") == Calibration("slow", "simple", 120)
    with pytest.raises(FedhenError, match="measured with tier 'simple', and the run has large"):
        phones.calibrate({"large": 1.0})
    assert parse_measured("slow:simple=1e2") == Calibration("slow", "simple", 100)
    for wrong, why in {
        "slow=3": "write CLASS:TIER=SECONDS",
        "slow:simple": "write CLASS:TIER=SECONDS",
        "slow:simple=x": "write a number and a unit",
        "slow:simple=nan": "write a number and a unit",
        "slow:simple=0": "it must be above 0",
        "slow:simple=-3": "it must be above 0",
        "slow:simple=3 d": "unknown unit in --measured 'd'",
    }.items():
        with pytest.raises(FedhenError, match=why):
            parse_measured(wrong)


def test_a_profile_that_is_written_is_read_as_it_was(tmp_path: Path) -> None:
    """Each quantity is divided by the size of its unit and multiplied by it again, with a rounding each."""
    odd = replace(read_profile("phones").classes[0], name='"slow" old', tier="simple", jitter=0.25, share=1.0)
    for profile in (
        take_measured(read_profile("phones"), parse_measured("slow:simple=310")).calibrate({"simple": 4.3e12}),
        replace(read_profile("sensors"), classes=(replace(odd, idle_power=Quantity(0.05, 0.01, 1 / 3)),)),
    ):
        (tmp_path / "written.toml").write_text(write_profile(profile))
        found = read_profile(tmp_path / "written.toml")
        assert replace(found, classes=()) == replace(profile, classes=())
        for own, other in zip(found.classes, profile.classes, strict=True):
            for name, value in vars(other).items():
                if isinstance(value, Quantity):
                    assert vars(getattr(own, name)) == pytest.approx(vars(value), rel=4e-16)
                else:
                    assert getattr(own, name) == value


def test_jitter_has_mean_one_and_an_address() -> None:
    """The mean of exp(σz − σ²/2) over 4000 draws, whose standard error is √(e^σ² − 1)/√4000 = 0.0049 for σ = 0.3."""
    own = read_profile("phones").classes[0]
    assert draw_jitter(own, 0, 1, 1) == 1.0
    shaky = replace(own, jitter=0.3)
    draws = [draw_jitter(shaky, 0, number, device) for number in range(40) for device in range(100)]
    assert mean(draws) == pytest.approx(1, abs=5 * 0.0049) and len(set(draws)) == 4000
    assert draw_jitter(shaky, 0, 3, 7) == draws[307]


@pytest.mark.parametrize("examples", [1, 5, 10, 23])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("max_steps", [0, 1, 4, 7, 100])
@pytest.mark.parametrize("drops", [False, True])
def test_visits_are_those_that_are_planned(examples: int, epochs: int, max_steps: int, drops: bool) -> None:
    planned = plan_visits(np.arange(examples), epochs, 5, drops, DeviceStreams(0, (1, 0)), max_steps)
    counted = count_visits(examples, epochs=epochs, batch_size=5, max_steps=max_steps, drop_last=drops)
    assert counted == len(planned.examples)


@pytest.mark.parametrize("examples", [1, 5, 12, 23])
@pytest.mark.parametrize("together", [2, 3])
@pytest.mark.parametrize("max_steps", [0, 2, 7])
def test_steps_of_several_batches_visit_what_is_grouped(examples: int, together: int, max_steps: int) -> None:
    planned = plan_visits(np.arange(examples), 2, 5, False, DeviceStreams(0, (1, 0)), max_steps)
    batches = [(torch.zeros(part.stop - part.start), torch.zeros(1)) for part in planned.batches()]
    grouped = sum(len(inputs) for group in group_batches(batches, together) for inputs, _ in group)
    counted = count_visits(examples, epochs=2, batch_size=5, max_steps=max_steps, together=together)
    assert counted == grouped


def test_phases_of_a_round_add_up() -> None:
    """12 examples in batches of 5: two epochs visit 24; of three batches one step takes two, 10 examples."""
    phases = [TrainingPhase({"simple": 10}, 2), TrainingPhase({"simple": 30}, 1, max_steps=3, batches=2)]
    steps = replace(Config().training, epochs=9, batch_size=5)
    assert Workload(examples=[12], phases=phases).count_round(["simple"], steps) == [24 * 10 + 10 * 30]
    assert Workload({}, {"simple": 7}, [12]).count_round(["simple"], steps) == [9 * 12 * 7]


@pytest.mark.process
def test_profiles_and_addresses_do_without_torch() -> None:
    code = (
        "import sys; from fedhen.profiles import reading; from fedhen.profiles.profile import draw_jitter; "
        "p = reading.read_profile('phones'); p.assign(['a', 'b'], ['a', 'b'], 0); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert seeds.number(0, "a") != seeds.number(0, "b")
