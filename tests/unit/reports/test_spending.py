"""Hours and joules of runs by a profile: a run of two devices worked out by hand, its tables, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedhen.config.recipes import load_recipe
from fedhen.config.toml import to_toml
from fedhen.errors import FedhenError
from fedhen.profiles.profile import Profile
from fedhen.profiles.reading import parse_measured, read_profile, take_measured
from fedhen.profiles.workload import Workload
from fedhen.reports.comparison import compare
from fedhen.reports.participation import Turnout
from fedhen.reports.report import write_report
from fedhen.reports.spending import Pricing, find_workload, price_runs
from fedhen.reports.spending_tables import PricedRuns
from fedhen.runs.reader import Run
from fedhen.runs.records import Promise, RoundRecord, Summary

PROFILE = """
[classes.old]
share = 0.5
tier = "simple"
speed = "1 GFLOP/s"
joules = "1 (0.5 to 4) J/GFLOP"
down = "1 MB/s"
up = "500 kB/s"
down_joules = "1 J/MB"
up_joules = "2 J/MB"
idle_power = "500 mW"

[classes.new]
share = 0.5
tier = "complex"
speed = "4 GFLOP/s"
joules = "0.5 J/GFLOP"
down = "2 MB/s"
up = "1 MB/s"
down_joules = "0.5 J/MB"
up_joules = "0.5 J/MB"
"""
MB = 1000000
WORKLOAD = Workload({}, {"simple": 10**8, "complex": 3 * 10**8}, [10, 20])


def play(number: int, active: list[int], accuracy: float, **more: list[int]) -> RoundRecord:
    size = {"simple": MB, "complex": 4 * MB}
    there = {"down": active, "up": [device for device in active if device not in more.get("late", [])]}
    scores = {"simple": accuracy, "complex": accuracy}
    return RoundRecord(
        round=number,
        active=active,
        dropped=[],
        late=more.get("late", []),
        bytes={way: {t: size[t] * (k in on) for k, t in enumerate(size)} for way, on in there.items()},
        accuracy={"devices": scores, "server": scores},
    )


def two_devices(method: str = "fedhen", workload: Workload = WORKLOAD) -> Run:
    """Both devices are active in round 1, the simple one in round 2, both in round 3, and none in round 4.

    In round 3 the complex device is late.
    """
    config = {
        **{"recipe": "made-up", "method": method, "seed": 0, "rounds": 4, "evaluation": {"every": 1}},
        **{"devices": {"number": 2}, "tiers": {"simple": 0.5, "complex": 0.5}, "targets": {"simple": [50.0]}},
        "training": {"epochs": 2, "batch_size": 5},
    }
    rounds = [play(1, [0, 1], 0.2), play(2, [0], 0.6), play(3, [0, 1], 0.6, late=[1]), play(4, [], 0.6)]
    summary = Summary(
        {"simple": 1, "complex": 2},
        training_operations=dict(workload.training_operations),
        examples=list(workload.examples),
        tier_examples=dict(workload.tier_examples),
    )
    return Run(Path("runs") / method, config, rounds, [], summary, {})


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    path = tmp_path / "two.toml"
    path.write_text(PROFILE)
    return read_profile(path)


def test_two_devices_by_hand(profile: Profile) -> None:
    """The old device trains 10 examples twice with 0.1 GFLOP each: 2 GFLOP; the new one 12.

    old: 1 s down, 2 s training, 2 s up: 5 s; 1 + 2 + 2 = 5 J.
    new: 2 s down, 3 s training, 4 s up: 9 s; 2 + 6 + 2 = 10 J.
    Round 1 lasts 9 s, in which the old one waits 4 s, for 2 J: 17 J.
    Round 2 lasts 5 s: 5 J.
    Round 3 ends when the old one has answered, after 5 s; the new one has spent 8 J and sent nothing: 13 J.
    Nothing happens in round 4.
    """
    found = Pricing(two_devices(), profile, WORKLOAD).typical
    assert found.seconds == pytest.approx({1: 9, 2: 14, 3: 19, 4: 19})
    assert found.joules == pytest.approx({1: 17, 2: 22, 3: 35, 4: 35})
    assert found.of_device == pytest.approx({0: 3 * 5 + 2, 1: 10 + 8})
    assert found.waiting == pytest.approx(4) and found.waiting_joules == pytest.approx(2)
    assert found.busy == pytest.approx(3 * 5 + 9 + 5)
    assert dict(found.waited_for) == {"complex": 1, "simple": 2}
    assert found.total_joules.training == pytest.approx(3 * 2 + 2 * 6)
    assert found.total_joules.radio == pytest.approx(3 * 3 + 4 + 2)


def test_ranges_are_those_of_the_sources(profile: Profile) -> None:
    """Only the old device's joules of training have a range: 2 J are 1 to 8, in three rounds."""
    pricing = Pricing(two_devices(), profile, WORKLOAD)
    assert pricing.low.joules[4] == pytest.approx(35 - 3)
    assert pricing.high.joules[4] == pytest.approx(35 + 18)
    assert pricing.low.seconds == pricing.high.seconds == pricing.typical.seconds


def test_a_report_names_every_device(profile: Profile, tmp_path: Path) -> None:
    """By hand, as above: the old device is asked in three rounds; the new one in two, and late in one."""
    dropping = two_devices("noside")
    dropping.rounds[1] = replace(dropping.rounds[1], dropped=[0])
    runs = [two_devices(), dropping]
    report = write_report(runs, tmp_path, profile=profile)
    assert (tmp_path / "participation.csv").read_text() == (
        "run,method,seed,device,tier,class,asked,merged,late,failed,joules\n"
        "runs/fedhen,fedhen,0,0,simple,old,3,3,0,0,17\n"
        "runs/fedhen,fedhen,0,1,complex,new,2,1,1,0,18\n"
        "runs/noside,noside,0,0,simple,old,3,2,0,1,17\n"
        "runs/noside,noside,0,1,complex,new,2,1,1,0,18\n"
    )
    names = {path.name for path in report.paths}
    assert names >= {"participation.csv", "participation.png", "participation.svg"}
    turnout = Turnout(compare(runs), PricedRuns(profile, price_runs(runs, profile, print)))
    curves = [curve.line.mean for plot in turnout.plots for curve in plot.curves]
    assert [{*values} for values in curves] == [{3.0}, {2.0}, {1.0}, {1.0}]


@pytest.mark.slow
def test_the_report_has_hours_joules_and_shares(profile: Profile, tmp_path: Path) -> None:
    """The simple model reaches 50 % in round 2: after 14 s and 22 J.

    In all rounds training takes 18 J of 35: 51.4 %. With the old device's training at its ends it is 15 of 32 J, and 36
    of 53. The worst device is the new one with 18 J, or the old one with 17 + 18. The devices wait 4 of 33 s.
    """
    report = write_report([two_devices()], tmp_path / "report", profile=profile)
    lines = [" ".join(line.split()) for line in report.text.splitlines()]
    assert lines[lines.index("Hours to target (all-devices average)") + 5] == "50.0 % 14.0 s"
    assert lines[lines.index("Joules to target (all-devices average)") + 5] == "50.0 % 22.0 J"
    for expected in (
        "time 19.0 s",
        "energy, all devices 35.0 J (32 to 53)",
        "energy, worst device 18.0 J (18 to 35)",
        "training’s share of the energy 51.4 % (46.9 to 67.9)",
        "waiting’s share of the devices’ time 12.1 %",
        "rounds that waited for a simple device 66.7 %",
        "energy, training 2.00 J (1 to 8)",
        "Classes of the devices: simple: 1 old; complex: 1 new.",
    ):
        assert expected in lines, report.text
    page = report.paths[0].read_text()
    assert page.count("<figure>") == 5 and 'id="spending"' in page
    names = {path.name for path in report.paths}
    assert {"curves-hours.png", "curves-joules.svg"} <= names


@pytest.mark.slow
def test_gains_are_in_hours(profile: Profile, tmp_path: Path) -> None:
    """The other method needs one round more to 50 %: 19 instead of 14 s, 1.4 times as long."""
    slower = two_devices("noside")
    slower.rounds[1] = play(2, [0], 0.4)
    text = write_report([two_devices(), slower], tmp_path / "report", profile=profile).text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "50.0 % 14.0 s 19.0 s 1.4×" in lines and "50.0 % 22.0 J 35.0 J 1.6×" in lines


def test_without_a_profile_nothing_changes(tmp_path: Path) -> None:
    report = write_report([two_devices()], tmp_path / "report")
    assert "Joules" not in report.text and {p.name for p in report.paths if "curves" in p.name} == {
        f"curves-{name}.{kind}" for name in ("rounds", "bytes") for kind in ("png", "svg")
    }


def test_one_measured_number_sets_the_time_of_training(profile: Profile) -> None:
    """The old device takes 4 s for what the profile says takes 2, and so the new one 6 s for its 3."""
    measured = take_measured(profile, parse_measured("old:simple=4"))
    found = Pricing(two_devices(), measured, WORKLOAD).typical
    assert found.seconds[1] == pytest.approx(2 + 6 + 4) and found.seconds[2] == pytest.approx(12 + 7)


def test_private_runs_count_the_mean_of_a_tier(profile: Profile) -> None:
    sums = replace(WORKLOAD, examples=[], tier_examples={"simple": 10, "complex": 20})
    assert Pricing(two_devices(), profile, sums).typical == Pricing(two_devices(), profile, WORKLOAD).typical


def test_runs_with_differential_privacy_have_no_hours() -> None:
    """Their records do not say who was active."""
    summary = Summary(parameters={"simple": 1, "complex": 2}, privacy=Promise(0.001, "rdp", 1.5))
    with pytest.raises(FedhenError, match=r"has differential privacy: .* leave out --profile"):
        find_workload(replace(two_devices(), summary=summary), print)


def test_a_profile_without_a_tier_of_the_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(PROFILE.split("[classes.new]")[0].replace("share = 0.5", "share = 1"))
    with pytest.raises(FedhenError, match="profile one has no class of tier 'complex', only of simple"):
        price_runs([two_devices()], read_profile(path), print)


def test_a_device_that_the_run_does_not_have_is_damage(profile: Profile) -> None:
    run = two_devices()
    run.rounds[3] = play(4, [7], 0.6)
    with pytest.raises(FedhenError, match="is damaged: device 7 was active, and there are 2 devices"):
        price_runs([run], profile, print)


def write_config(folder: Path, text: str) -> Run:
    folder.mkdir()
    (folder / "config.toml").write_text(text)
    return replace(two_devices(), folder=folder, summary=None)


@pytest.mark.slow
def test_an_older_run_is_counted_again(tmp_path: Path) -> None:
    """The digits without a record: 1400 examples over 20 devices."""
    run = write_config(tmp_path / "run", to_toml(load_recipe("digits")))
    run.config["devices"]["number"] = 20
    said: list[str] = []
    found = find_workload(run, said.append)
    assert found.examples == [70] * 20 and set(found.training_operations) == {"simple", "complex"}
    assert said == [f"counting the operations of {run.folder}, which did not record them"]


def test_what_cannot_be_counted_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write_config(tmp_path / "own", '[model]\nfamily = "python"\n')
    with pytest.raises(
        FedhenError, match="it cannot be counted: its models or data are your own: resume the run and let it end"
    ):
        find_workload(own, lambda text: None)
    monkeypatch.setitem(sys.modules, "fedhen.experiment.recount", None)
    with pytest.raises(FedhenError, match="it cannot be counted without torch: install torch"):
        find_workload(own, lambda text: None)
