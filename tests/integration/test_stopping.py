"""Runs that stop by themselves, and the examples that are held out for that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedhen
from fedhen.cli import main
from fedhen.config import validation
from fedhen.config.evaluation_settings import StopConfig
from fedhen.config.settings import Config
from fedhen.data.partitions import hold_out
from fedhen.errors import FedhenError
from fedhen.experiment.best_models import Standing
from fedhen.experiment.build import build_experiment
from fedhen.experiment.resume import ResumePolicy
from fedhen.experiment.saved_models import open_models
from fedhen.experiment.stopping import find_reason
from fedhen.runs.reader import read_run
from fedhen.runs.records import ACCURACY, MetricInfo
from support.kills import same_run
from support.stopped_runs import SETTINGS, PlayedRun, clusters, frozen_body
from support.tiny import TINY_OPTIONS

RESUME = ResumePolicy(resume=True)
TIERS = ("simple", "complex")
ROUNDS = 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> PlayedRun:
    """A run of all its rounds."""
    return PlayedRun(tmp_path_factory.mktemp("whole") / "run").play(rounds=ROUNDS)


def find_stop(accuracies: Sequence[Sequence[float]], patience: int, since: int = 0) -> int:
    """Returns the round in which a run stops that is evaluated in every round: how long ago was a tier best?

    `since` is the round in which it has stopped before.
    """

    def is_record(curve: Sequence[float], number: int) -> bool:
        return curve[number - 1] > max((0, *curve[: number - 1]))

    for number in range(since + 1, len(accuracies[0]) + 1):
        records = [each for each in range(1, number + 1) if any(is_record(curve, each) for curve in accuracies)]
        if number - max((since, *records)) >= patience:
            return number
    return 0


def check_stopped(run: PlayedRun, whole: PlayedRun, number: int, reason: str) -> None:
    """The rounds are those of the whole run, and the models are of the last of them."""
    assert run.records == whole.records[:number]
    found, summary = read_run(run.folder), json.loads((run.folder / "summary.json").read_text())
    assert found.stopped == reason and found.length == number and found.is_complete and not found.damage
    assert summary["rounds"] == number and summary["final"] == whole.records[number - 1]["accuracy"]
    for of in ("server", "devices"):
        saved = open_models(run.folder).read("complex", of)
        assert saved.round == number
        assert all((saved.weights[n] == x).all() for n, x in whole.models[number][of]["complex"].items())


@pytest.mark.slow
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_run_stops_when_nothing_improves(patience: int, whole: PlayedRun, tmp_path: Path) -> None:
    """Of the models that reports show, the devices' average."""
    number = find_stop([whole.accuracy("devices", tier) for tier in TIERS], patience)
    assert patience < number < ROUNDS
    run = PlayedRun(tmp_path / "run").play(rounds=ROUNDS, stop={"patience": patience})
    check_stopped(run, whole, number, f"no improvement in {patience} evaluation{'s' * (patience > 1)}")


def reachable_targets(whole: PlayedRun) -> tuple[dict[str, float], int]:
    """Targets that the tiers first reach in different rounds, and the round in which both are reached."""
    curves = {tier: [100 * x for x in whole.accuracy("devices", tier)] for tier in TIERS}
    targets = {tier: round(max(curve[:12]), 6) for tier, curve in curves.items()}
    targets["simple"] -= 2.5
    both = [k + 1 for k in range(ROUNDS) if all(round(curves[t][k], 6) >= targets[t] for t in TIERS)]
    return targets, both[0] if both else 0


@pytest.mark.slow
def test_a_run_stops_when_its_targets_are_reached(whole: PlayedRun, tmp_path: Path) -> None:
    targets, number = reachable_targets(whole)
    assert 1 < number < ROUNDS
    run = PlayedRun(tmp_path / "run").play(rounds=ROUNDS, stop={"until": targets})
    said = f"reached simple {targets['simple']:g} %, complex {targets['complex']:g} % in round {number}"
    check_stopped(run, whole, number, said)
    report = fedhen.report(run.folder, out=tmp_path / "report")
    assert f"Stopped: fedhen, seed 0 (run), after {number} of {ROUNDS} rounds: {said}." in report
    assert "Unfinished" not in report


@pytest.mark.slow
def test_a_stopped_run_continues_with_more_rounds_or_another_rule(whole: PlayedRun, tmp_path: Path) -> None:
    stopped = PlayedRun(tmp_path / "run").play(rounds=ROUNDS - 1, stop={"patience": 2})
    number = len(stopped.records)
    assert stopped.play(RESUME, rounds=ROUNDS - 1, stop={"patience": 2}).records == stopped.records, "it is finished"
    without, more = stopped.copy(tmp_path / "without"), stopped.copy(tmp_path / "more")
    without.play(RESUME, rounds=ROUNDS)
    assert same_run(whole.folder, without.folder)
    # The rule counts again from the round in which it stopped.
    more.play(RESUME, rounds=ROUNDS, stop={"patience": 2})
    expected = find_stop([whole.accuracy("devices", tier) for tier in TIERS], 2, since=number)
    assert more.records == whole.records[:expected] and number + 2 <= expected < ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["patience", "until"])
def test_a_run_that_is_killed_stops_in_the_same_round(rule: str, whole: PlayedRun, tmp_path: Path) -> None:
    """Broken off before it stops, and after its last checkpoint, before models and summary are written."""
    stop: dict[str, Any] = {"patience": 2} if rule == "patience" else {"until": reachable_targets(whole)[0]}
    run = PlayedRun(tmp_path / "run").play(rounds=ROUNDS, stop=stop)
    number = len(run.records)
    late = run.copy(tmp_path / "late")
    (late.folder / "summary.json").unlink()
    shutil.rmtree(late.folder / "models")
    assert late.play(RESUME, rounds=ROUNDS, stop=stop).records == run.records
    assert same_run(run.folder, late.folder)
    for when in {1, number - 1}:
        cut = PlayedRun(tmp_path / f"cut{when}").play(rounds=ROUNDS, stop=stop, stop_after=when)
        cut.play(RESUME, rounds=ROUNDS, stop=stop)
        assert same_run(run.folder, cut.folder)


def test_a_run_without_a_folder_stops_too(whole: PlayedRun) -> None:
    settings: dict[str, Any] = {k: v for k, v in SETTINGS.items() if k not in ("data", "model")} | {"rounds": ROUNDS}
    run = fedhen.train(frozen_body(), clusters(), accelerator="cpu", stop={"patience": 2}, **settings)
    wanted = find_stop([whole.accuracy("devices", tier) for tier in TIERS], 2)
    assert [r["accuracy"] for r in run.rounds] == [r["accuracy"] for r in whole.records[:wanted]]


def test_values_that_should_fall_are_reached_from_above() -> None:
    error, stop = MetricInfo("rmse", "m", "lower"), StopConfig(until={"simple": 2.0, "complex": 1.5})
    assert find_reason(stop, error, 7, {"simple": 2.1, "complex": 1.0}, 0) == ""
    assert find_reason(stop, error, 7, {"simple": 2.0, "complex": None}, 0) == ""
    reached = find_reason(stop, error, 7, {"simple": 2.0, "complex": 1.5}, 0)
    assert reached == "reached simple 2 m, complex 1.5 m in round 7"
    # 84.4 % as a share is not exact in binary.
    assert find_reason(StopConfig(until={"simple": 84.4}), ACCURACY, 1, {"simple": 0.844}, 0)


def test_what_counts_as_an_improvement() -> None:
    """A value that is equal, or not finite, is none; the server's models do not count if the devices' are kept."""
    rule, standing, kept = StopConfig(patience=4), Standing(), []
    values = [(None, 0.1), (3.0, 0.2), (3.0, 0.3), (None, 0.4), (3.5, 0.5), (2.9, 0.6), (3.2, 0.7)]
    for number, (own, server) in enumerate(values, start=1):
        weights = {"simple": {"a": torch.tensor(number)}}
        seen: Any = {"server": {"simple": server}, "devices": {"simple": own}}
        metric = MetricInfo("rmse", "", "lower")
        standing = standing.observe(number, seen, {"server": weights, "devices": weights}, metric, rule)
        kept.append((standing.waited, standing.best["devices"].get("simple")))
    assert [waited for waited, _ in kept] == [1, 0, 1, 2, 3, 0, 1] and kept[0][1] is None
    assert [best.round for _, best in kept if best] == [2, 2, 2, 2, 6, 6]
    assert kept[-1][1] is not None and int(kept[-1][1].weights["a"]) == 6
    assert standing.best["server"]["simple"].round == 1, "the lowest of the server's"


@pytest.mark.slow
def test_rules_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = [
        "run",
        "digits",
        "--rounds",
        "6",
        *TINY_OPTIONS,
        "--quiet",
        "--accelerator=cpu",
        "--out",
        str(tmp_path / "run"),
    ]
    for flags, said in (
        (["--until", "simple"], "write it like simple=90,complex=88, or none"),
        (["--until", "simpel=90"], "unknown tier in stop.until 'simpel': did you mean 'simple'"),
        (["--until", "simple=0"], "stop.until.simple must be percents"),
        (["--patience", "-1"], "stop.patience = -1 is too small"),
    ):
        assert main([*run, *flags]) == 2 and said in capsys.readouterr().err
    assert main([*run, "--until", "simple=1,complex=1"]) == 0
    played = len(read_run(tmp_path / "run").rounds)
    said = f"stopped after {played} of 6 rounds: reached simple 1 %, complex 1 % in round {played}"
    assert played < 6 and said in capsys.readouterr().out
    resume = ["resume", str(tmp_path / "run"), "--quiet", "--accelerator=cpu"]
    assert main(resume) == 0
    assert "is finished: add rounds with --rounds N, or change its rule" in capsys.readouterr().out
    assert main([*resume, "--until", "none", "--patience", "50"]) == 0
    run_now = read_run(tmp_path / "run")
    assert len(run_now.rounds) == 6 and not run_now.stopped and run_now.config["stop"]["patience"] == 50


def test_a_method_with_fewer_tiers_keeps_its_targets() -> None:
    config = validation.from_mapping({"stop": {"until": {"simple": 90, "complex": 88}}})
    assert config.with_tiers({"complex": 1.0}).stop.until == {"complex": 88.0}


def split(shards: Sequence[int] = ()) -> fedhen.Data:
    x = torch.arange(100.0).reshape(100, 1)
    data = fedhen.arrays(x, torch.arange(100) % 4, x[:7], torch.zeros(7, dtype=torch.int64), classes=4)
    ends = np.cumsum(shards)
    return data.split([np.arange(end - n, end) for n, end in zip(shards, ends, strict=True)]) if shards else data


def test_a_share_of_the_training_examples_is_held_out() -> None:
    """Nothing is lost, nothing is in both, and the seed decides which."""
    data, held = hold_out(split(), 0.1, 3)
    assert held is not None and len(held.y_test) == 10 and len(data.y) == 90
    assert sorted([*data.x[:, 0].tolist(), *held.x_test[:, 0].tolist()]) == list(range(100))
    assert all(int(x) % 4 == int(y) for x, y in zip(data.x[:, 0], data.y, strict=True))
    assert torch.equal(hold_out(split(), 0.1, 3)[1].x_test, held.x_test)  # type: ignore[union-attr]
    assert not torch.equal(hold_out(split(), 0.1, 4)[1].x_test, held.x_test)  # type: ignore[union-attr]
    assert hold_out(split(), 0.0, 3)[1] is None
    with pytest.raises(FedhenError, match="holds out no example"):
        hold_out(split(), 0.001, 3)


def test_of_data_that_comes_split_a_share_of_each_devices_examples_is_held_out() -> None:
    """Rounded, and never a device's last one."""
    data, held = hold_out(split([60, 37, 2, 1]), 0.5, 0)
    assert held is not None and [len(shard) for shard in data.shards] == [30, 37 - 18, 1, 1]
    assert len(held.y_test) == 30 + 18 + 1
    before = split([60, 37, 2, 1])
    for kept, shard in zip(data.shards, before.shards, strict=True):
        assert set(data.x[kept][:, 0].tolist()) <= set(before.x[shard][:, 0].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_the_best_round_is_chosen_on_the_held_out_examples(workers: int, tmp_path: Path) -> None:
    """Scored again here, without the engine; the test set is scored as before, and would choose another round."""
    runtime = {"engine": "fast", "workers": workers}
    run = PlayedRun(tmp_path / "run").play(evaluation={"every": 1, "validation": 0.3}, runtime=runtime)
    config = validation.from_mapping({"seed": 0})
    _, held = hold_out(clusters(), 0.3, config.seed)
    assert held is not None and len(held.y_test) == 48

    def accuracy(weights: Any, tier: str) -> float:
        module = frozen_body().build(tier)
        module.load_state_dict({**module.state_dict(), **weights})
        return float((module(held.x_test.double())[-1].argmax(1) == held.y_test).double().mean())

    for number, record in enumerate(run.records, start=1):
        for of, tiers in record["validation"].items():
            for tier, value in tiers.items():
                assert value == accuracy(run.models[number][of][tier], tier)
    for of in ("server", "devices"):
        for tier in TIERS:
            curve = [record["validation"][of][tier] for record in run.records]
            assert open_models(run.folder).read(tier, of, "best").round == 1 + curve.index(max(curve))
    by_test = {
        of: {t: 1 + run.accuracy(of, t).index(max(run.accuracy(of, t))) for t in TIERS} for of in ("server", "devices")
    }
    assert json.loads((run.folder / "summary.json").read_text())["best_rounds"] != by_test
    assert read_run(run.folder).rounds[2].validation == run.records[2]["validation"]


def test_nothing_is_held_out_by_default(whole: PlayedRun) -> None:
    assert Config().evaluation.validation == 0 and all("validation" not in record for record in whole.records)
    experiment = build_experiment(
        validation.from_mapping(SETTINGS), data=clusters(), family=frozen_body(), accelerator="cpu"
    )
    assert experiment.population.validation is None and len(experiment.population.data.y) == 160


@pytest.mark.slow
def test_a_run_with_held_out_examples_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"evaluation": {"every": 1, "validation": 0.2}, "rounds": 6}
    whole = PlayedRun(tmp_path / "whole").play(**changes)
    cut = PlayedRun(tmp_path / "cut").play(stop_after=3, **changes)
    cut.play(RESUME, **changes)
    assert same_run(whole.folder, cut.folder)
    changes["evaluation"]["validation"] = 0.1
    with pytest.raises(FedhenError, match=r"evaluation.validation is 0.1, was 0.2"):
        cut.play(RESUME, **changes)
