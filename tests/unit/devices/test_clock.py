"""The clock of a simulation: who is late, what the report makes of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedhen.errors import FedhenError
from fedhen.experiment.build import start_experiment
from fedhen.experiment.experiment import Experiment
from fedhen.experiment.runner import play_run
from fedhen.profiles.reading import read_profile
from fedhen.reports.report import write_report
from fedhen.reports.spending import price_runs
from fedhen.runs.reader import read_run
from support.noise import experiment

CLASS = """
[classes.{name}]
share = {share}
tier = "{tier}"
speed = "{speed} MFLOP/s"
joules = "1 J/GFLOP"
down = "{down} kB/s"
up = "{up} kB/s"
down_joules = "1 J/MB"
up_joules = "1 J/MB"
"""
OLD = CLASS.format(name="old", share=0.5, tier="simple", speed=0.00168, down=0.424, up=0.424)
NEW = CLASS.format(name="new", share=0.25, tier="complex", speed=0.003216, down=0.736, up=0.736)
SLOW = CLASS.format(name="slow", share=0.25, tier="complex", speed=0.003216, down=0.736, up=0.184)
"""Eight examples of 6·45 − 2·30 = 210 and 402 operations in one epoch: 1680 and 3216. Models have 53 and 92 doubles.

So everything takes a second, but a slow device's upload, which takes four.
"""
TEN = {"number": 10, "active": 10}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "three.toml"
    path.write_text(OLD + NEW + SLOW)
    return path


def played(path: Path, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    clock = {"profile": str(path), **settings.pop("clock", {})}
    return [step.record for step in play_run(folder, experiment(clock=clock, **settings))]


def test_a_deadline_by_hand(profile: Path, tmp_path: Path) -> None:
    """All ten are active. Old and new devices take 3 s, the slow ones 6: with a deadline of 4 s they are late.

    The five complex devices are dealt by 1/4 to 1/4: round(2.5) = 2 new and 3 slow ones. A late device received its
    model and sent nothing. The report's rounds last 4 s, and without a deadline 6 s.
    """
    records = played(profile, tmp_path / "late", devices=TEN, rounds=2, clock={"deadline_seconds": 4})
    for record in records:
        assert record["active"] == list(range(10)) and len(record["late"]) == 3 and min(record["late"]) >= 5
        assert record["bytes"] == {
            "down": {"simple": 5 * 53 * 8, "complex": 5 * 92 * 8},
            "up": {"simple": 5 * 53 * 8, "complex": 2 * 92 * 8},
        }
    whole = played(profile, tmp_path / "whole", devices=TEN, rounds=2)
    assert "late" not in whole[0]
    runs = [read_run(tmp_path / name) for name in ("late", "whole")]
    late, patient = price_runs(runs, read_profile(profile), print).values()
    assert late.typical.seconds == pytest.approx({1: 4, 2: 8})
    assert patient.typical.seconds == pytest.approx({1: 6, 2: 12})
    assert late.typical.waiting == pytest.approx(2 * 7 * 1.0)


def test_spare_devices_make_a_round_end_without_the_slowest(profile: Path, tmp_path: Path) -> None:
    """Seven of ten answers are enough, and the three slow devices are the last."""
    records = played(
        profile, tmp_path / "run", devices={"number": 10, "active": 7}, rounds=2, clock={"spare_devices": 3}
    )
    assert all(len(record["active"]) == 10 and len(record["late"]) == 3 for record in records)
    (found,) = price_runs([read_run(tmp_path / "run")], read_profile(profile), print).values()
    assert found.typical.seconds == pytest.approx({1: 3, 2: 6})


def test_devices_that_drop_out_are_not_waited_for(profile: Path, tmp_path: Path) -> None:
    profile.write_text(OLD + NEW + SLOW + "dropout = 1\n")
    records = played(profile, tmp_path / "run", devices=TEN, rounds=2)
    assert all(len(record["late"]) == 3 for record in records)
    (found,) = price_runs([read_run(tmp_path / "run")], read_profile(profile), print).values()
    assert found.typical.seconds == pytest.approx({1: 3, 2: 6})


def test_devices_that_are_not_available_are_not_asked(profile: Path, tmp_path: Path) -> None:
    """Half of the time: in 40 rounds with all devices, 3 of them 60 times, with a deviation of √(120/4) = 5.5."""
    profile.write_text(OLD + NEW + SLOW + "availability = 0.5\n")
    records = played(profile, tmp_path / "run", devices=TEN, rounds=40, evaluation={"every": 40})
    missing = sum(10 - len(record["active"]) for record in records)
    assert abs(missing - 60) < 5 * 5.5
    assert all("late" not in record for record in records)


def test_late_devices_keep_nothing_of_the_round(profile: Path) -> None:
    """As in a fleet: a device whose update was not merged returns to the state that it had before.

    SCAFFOLD doubles what is sent: 5 s, and 11 s for slow devices.
    """
    clock = {"profile": str(profile), "deadline_seconds": 6}
    run = experiment(clock=clock, devices=TEN, rounds=1, local={"name": "scaffold"})
    (step,) = run.play()
    assert len(step.record["late"]) == 3
    assert set(run.memory) == set(range(10)) - set(step.record["late"])


def test_a_profile_whose_devices_all_answer_changes_nothing(profile: Path, tmp_path: Path) -> None:
    played(profile, tmp_path / "clock", devices=TEN, rounds=2)
    (tmp_path / "none").mkdir()
    list(play_run(tmp_path / "none", experiment(devices=TEN, rounds=2)))
    names = ["rounds.jsonl", *(f"models/{path.name}" for path in (tmp_path / "none" / "models").iterdir())]
    assert len(names) > 2
    assert all((tmp_path / "none" / n).read_bytes() == (tmp_path / "clock" / n).read_bytes() for n in names)


@pytest.mark.slow
def test_the_report_shows_who_took_part(profile: Path, tmp_path: Path) -> None:
    """In each of two rounds five simple and two complex updates are merged: the simple share is 5/7."""
    played(profile, tmp_path / "run", devices=TEN, rounds=2, clock={"deadline_seconds": 4})
    text = write_report([read_run(tmp_path / "run")], tmp_path / "out", profile=read_profile(profile)).text
    lines = [" ".join(line.split()) for line in text.split("Participation\n")[1].splitlines()]
    simple, complex_ = lines.index("simple devices"), lines.index("complex devices")
    assert lines[simple + 1] == "share of the merged updates, % 71.4"
    assert lines[simple + 7] == "evenness 1.00"
    assert lines[complex_ + 1 : complex_ + 8] == [
        "share of the merged updates, % 28.6",
        "asked and not merged, % 60.0",
        "devices never merged 3",
        "rounds of a device, fewest 0",
        "rounds of a device, median 0",
        "rounds of a device, most 2",
        "evenness 0.40",
    ]


def refused(**settings: Any) -> str:
    with pytest.raises(FedhenError) as error:
        experiment(**settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_does_not_fit_is_refused_in_one_line(profile: Path) -> None:
    three = {"profile": str(profile)}
    assert refused(clock={**three, "deadline_seconds": 2}) == (
        "clock.deadline_seconds=2: no simple device meets it, the fastest (of class old) takes 3 s, 1 s too long; "
        "no complex device meets it, the fastest (of class new) takes 3 s, 1 s too long; raise it"
    )
    profile.write_text(OLD.replace("0.5", "1"))
    assert refused(clock=three) == "profile three has no class of tier 'complex', only of simple: add a class of it"
    assert "needs clock.profile" in refused(clock={"deadline_seconds": 2})
    assert "set clock.profile" in refused(devices={**TEN, "sampling": "oort"})
    assert "set clock.deadline_seconds" in refused(clock={"profile": "phones"}, devices={**TEN, "sampling": "deadline"})
    assert "are more than devices.number=10" in refused(clock={"profile": "phones", "spare_devices": 7})
    assert "unknown profile" in refused(clock={"profile": "fones"})
    assert "unit" in refused_profile(profile, OLD.replace("MFLOP/s", "MFLIP/s"))
    assert "must be above 0" in refused_profile(profile, OLD.replace("0.00168", "-1"))
    assert "add up to 0.5" in refused_profile(profile, OLD)


def refused_profile(path: Path, text: str) -> str:
    path.write_text(text)
    return refused(clock={"profile": str(path)})


def test_a_changed_profile_is_not_resumed(profile: Path, tmp_path: Path) -> None:
    from fedhen.experiment.resume import ResumePolicy

    folder = tmp_path / "run"
    folder.mkdir()
    settings: dict[str, Any] = {"clock": {"profile": str(profile)}, "checkpoint": {"rounds": 1}, "devices": TEN}
    steps = play_run(folder, experiment(rounds=3, **settings))
    next(steps)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    profile.write_text(OLD + NEW + SLOW + "dropout = 1\n")
    with pytest.raises(FedhenError, match="profile of devices"):
        list(play_run(folder, experiment(rounds=3, **settings), ResumePolicy(resume=True)))


def make_oort(rounds: int) -> Experiment:
    devices = {"number": 10, "sampling": "oort", "active": 4}
    return experiment(rounds=rounds, devices=devices, clock={"profile": "phones"}, checkpoint={"rounds": 1})


def test_oorts_notes_are_saved_and_damaged_ones_refused(tmp_path: Path) -> None:
    from fedhen.experiment.checkpoint_files import DamagedCheckpoint, open_checkpoint
    from fedhen.experiment.checkpoint_state import check_checkpoint

    run = make_oort(3)
    records = [step.record for step in play_run(tmp_path, run)]
    saved = open_checkpoint(tmp_path / "checkpoints", 3)
    heard = {device: record["round"] for record in records for device in record["active"]}
    assert dict(saved.manifest["sampler"]["heard"]) == heard and len(saved.manifest["sampler"]["gains"]) == 3
    assert json.loads(json.dumps(run.notes.describe() if run.notes else None)) == saved.manifest["sampler"]
    manifest: Any = saved.manifest
    for wrong in ({}, {"heard": [[99, 1]], "gains": [], "percentile": 30}, "nonsense"):
        manifest["sampler"] = wrong
        with pytest.raises(DamagedCheckpoint):
            check_checkpoint(saved, start_experiment(run.population).state())
