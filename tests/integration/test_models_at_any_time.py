"""The models of runs that are being played, stopped or finished, of the last round and of the best."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import fedhen
from fedhen.cli import main
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.errors import FedhenError
from fedhen.experiment import checkpoint_files
from fedhen.experiment.build import build_experiment
from fedhen.experiment.finish import finish_run
from fedhen.experiment.resume import ResumePolicy
from fedhen.experiment.runner import play_run
from fedhen.experiment.saved_models import open_models
from fedhen.fileio.locks import lock_folder
from fedhen.runs.reader import read_run
from support.kills import lasting_files, same_run
from support.stopped_runs import PlayedRun, clusters, frozen_body, same_weights, wait_for_writer
from support.tiny import TINY

RESUME = ResumePolicy(resume=True)
OWNERS, TIERS = ("server", "devices"), ("simple", "complex")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> PlayedRun:
    """A run of eight rounds to its end."""
    return PlayedRun(tmp_path_factory.mktemp("played") / "run").play()


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> PlayedRun:
    """The same run, broken off after its fifth round."""
    return PlayedRun(tmp_path_factory.mktemp("broken") / "run").play(stop_after=5)


@pytest.fixture
def stopped(broken_off: PlayedRun, tmp_path: Path) -> PlayedRun:
    """A copy of it, which a test may change."""
    return broken_off.copy(tmp_path / "run")


def best_round(accuracy: list[float]) -> int:
    """The first of the rounds with the highest accuracy."""
    return 1 + accuracy.index(max(accuracy))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedhen", "decouple"])
def test_models_of_a_run_that_is_being_played(method: str, tmp_path: Path) -> None:
    """After every round, with the frozen weights; the folder is locked meanwhile. Rounds 1 and 2 leave idle devices."""
    run = PlayedRun(tmp_path / "run")
    run.folder.mkdir()
    for step in run.steps(method=method, rounds=4):
        number = step.record["round"]
        wait_for_writer()
        if number == 4:
            break
        with pytest.raises(FedhenError, match="in use by another process"), lock_folder(run.folder):
            pass
        for owner in OWNERS:
            for tier in TIERS:
                with pytest.warns(UserWarning, match=f"is not finished: its models are of round {number} of 4"):
                    model: Any = fedhen.load(run.folder, tier, owner, family=frozen_body())
                assert model.round == number and same_weights(
                    model, {**model.state_dict(), **run.models[number][owner][tier]}
                )
                assert all(name in model.state_dict() for name in run.models[number][owner][tier])
        with pytest.warns(UserWarning, match="is not finished"):
            scores = fedhen.evaluate(run.folder, family=frozen_body(), data=clusters(), accelerator="cpu")
        assert scores == step.record["accuracy"]
        assert scores.rounds == {owner: dict.fromkeys(TIERS, number) for owner in OWNERS}


def test_the_best_models_are_those_of_the_rounds_with_the_best_accuracy(played: PlayedRun) -> None:
    """Of each owner and tier. Some were best in the last round, and so have no file of their own."""
    rounds = {(of, tier): best_round(played.accuracy(of, tier)) for of in OWNERS for tier in TIERS}
    assert len(set(rounds.values())) > 1 and min(rounds.values()) < 8
    for (of, tier), number in rounds.items():
        saved = open_models(played.folder).read(tier, of, "best")
        assert saved.round == number and saved.weights.keys() == played.models[number][of][tier].keys()
        assert all((saved.weights[name] == x).all() for name, x in played.models[number][of][tier].items())
        path = played.folder / "models" / f"best-{of}-{tier}.safetensors"
        assert path.is_file() == (number != 8)
        if path.is_file():
            with safe_open(path, framework="pt") as file:
                assert json.loads(file.metadata()["fedhen"])["round"] == number
    summary = json.loads((played.folder / "summary.json").read_text())
    assert summary["best_rounds"] == {of: {tier: rounds[of, tier] for tier in TIERS} for of in OWNERS}
    best: Any = fedhen.load(played.folder, "simple", of="devices", at="best", family=frozen_body())
    assert best.round == rounds["devices", "simple"]
    assert fedhen.load(played.folder, "simple", kind="devices", family=frozen_body()).round == 8


def test_the_best_models_before_the_end_are_in_the_checkpoint(stopped: PlayedRun) -> None:
    assert checkpoint_files.list_rounds(stopped.folder / "checkpoints")[0] == 5
    for of in OWNERS:
        for tier in TIERS:
            number = best_round(stopped.accuracy(of, tier))
            saved = open_models(stopped.folder).read(tier, of, "best")
            assert saved.round == number
            assert all((saved.weights[name] == x).all() for name, x in stopped.models[number][of][tier].items())
    with pytest.warns(UserWarning, match="round 5 of 8"):
        scores = fedhen.evaluate(stopped.folder, at="best", of="server", family=frozen_body(), data=clusters())
    assert scores == {"server": {tier: max(stopped.accuracy("server", tier)) for tier in TIERS}}


def test_a_resumed_run_keeps_the_best_models_of_before(stopped: PlayedRun, played: PlayedRun) -> None:
    stopped.play(RESUME)
    assert same_run(played.folder, stopped.folder)
    assert any(path.name.startswith("best-") for path in (stopped.folder / "models").iterdir())


def test_a_torn_checkpoint_is_skipped(stopped: PlayedRun) -> None:
    place = stopped.folder / "checkpoints"
    newest = place / "round-000005.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    assert open_models(stopped.folder).round == 4
    model = open_models(stopped.folder).read("complex", "devices")
    assert all((model.weights[name] == x).all() for name, x in stopped.models[4]["devices"]["complex"].items())
    shutil.copy(place / "round-000004.json", place / "round-000005.json")
    assert open_models(stopped.folder).round == 4
    (place / "round-000004.safetensors").unlink()
    with pytest.raises(FedhenError, match=r"round 5 cannot be used: .*round 4 cannot be used"):
        open_models(stopped.folder)


def test_a_checkpoint_may_be_removed_while_it_is_read(stopped: PlayedRun) -> None:
    """As the run does that is being played: it keeps two."""
    models = open_models(stopped.folder)
    shutil.rmtree(stopped.folder / "checkpoints")
    for of in OWNERS:
        found = models.read("simple", of).weights
        assert all((found[name] == x).all() for name, x in stopped.models[5][of]["simple"].items())


def test_runs_without_models_say_so(stopped: PlayedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stopped.folder / "checkpoints" / "start.json").unlink()
    with pytest.raises(FedhenError, match=r"not what it started from .*: resume it, which writes that"):
        fedhen.load(stopped.folder, "simple")
    shutil.rmtree(stopped.folder / "checkpoints")
    with pytest.raises(FedhenError, match="has no models yet: it is not finished, and has no checkpoint"):
        fedhen.load(stopped.folder, "simple")
    for command in ("finish", "evaluate"):
        assert main([command, str(stopped.folder)]) == 2
        assert "has no checkpoint" in capsys.readouterr().err
    assert main(["finish", str(tmp_path)]) == 2 and "is not a run folder" in capsys.readouterr().err


def test_nothing_that_a_run_folder_names_is_executed(stopped: PlayedRun, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    config = stopped.folder / "config.toml"
    for key in ("method_file", "family"):
        config.write_text(
            toml.to_toml(toml.read_toml(config)).replace(f'{key} = "', f'{key} = "{tmp_path}/evil.py:X', 1)
        )
    with pytest.warns(UserWarning, match="is not finished"), pytest.raises(FedhenError):
        fedhen.load(stopped.folder, "simple")
    assert finish_run(stopped.folder) and not (tmp_path / "executed").exists()


def test_a_forged_checkpoint_is_one_line(stopped: PlayedRun) -> None:
    """Its checksums are right, and its devices, weights or rounds are not the run's."""
    saved = checkpoint_files.open_checkpoint(stopped.folder / "checkpoints", 5)
    for key, value in (
        ("shelves", {"rows": [[99, 0]]}),
        ("sharing", {"server": {"simple": {"exit.weight": 99}}}),
        ("sharing", {"server": {"simple": {"stranger": 0}}}),
        ("standing", {"best": {"devices": {"simple": ["x", 0.5]}}}),
    ):
        manifest = {k: v for k, v in saved.manifest.items() if k != "check"} | {key: value}
        path = stopped.folder / "checkpoints" / "round-000005.json"
        path.write_bytes(checkpoint_files._render_manifest(manifest))
        with pytest.raises(FedhenError, match="the checkpoint of round 5 is malformed"):
            open_models(stopped.folder).read("simple", "devices", "best" if key == "standing" else "last")


@pytest.mark.slow
@pytest.mark.filterwarnings("always:.*is not finished")
def test_an_evaluated_unfinished_run_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of the digits, to be scored again without files of one's own."""
    (tmp_path / "run").mkdir()
    changes = [*TINY, "rounds=4", "evaluation.every=2", "checkpoint.rounds=1", "runtime.engine=plain"]
    config = toml.apply_settings(load_recipe("digits"), changes)
    steps = play_run(tmp_path / "run", build_experiment(config, accelerator="cpu"))
    with closing(steps) as playing:  # type: ignore[type-var]
        for number in (1, 2, 3):
            next(playing)
            wait_for_writer()
            assert main(["evaluate", str(tmp_path / "run"), "--accelerator=cpu"]) == 0
            said = capsys.readouterr()
            assert said.err == f"fedhen: {tmp_path / 'run'} is not finished: its models are of round {number} of 4\n"
            header, *rows = [line.split() for line in said.out.splitlines()]
            assert header[2] == "round" and len(rows) == 4
            assert all(row[2] == str(number) and (row[-1] == "–") == (number != 2) for row in rows)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "Unfinished: fedhen, seed 0 (run), 3 of 4 rounds recorded" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_finished_by_hand_and_resumed_nevertheless(stopped: PlayedRun, played: PlayedRun) -> None:
    """It ends after its newest checkpoint that can be used; what was recorded after it is removed."""
    newest = stopped.folder / "checkpoints" / "round-000005.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    assert len(read_run(stopped.folder).rounds) == 5
    assert finish_run(stopped.folder) and not finish_run(stopped.folder)
    run = read_run(stopped.folder)
    assert len(run.rounds) == 4 and run.length == 4 and run.stopped == "finished by hand" and not run.damage
    summary = json.loads((stopped.folder / "summary.json").read_text())
    assert summary["final"] == played.records[3]["accuracy"] and summary["rounds"] == 4
    assert summary["parameters"] == json.loads((played.folder / "summary.json").read_text())["parameters"]
    for of in OWNERS:
        for tier in TIERS:
            model: Any = fedhen.load(stopped.folder, tier, of, family=frozen_body())
            assert model.round == 4
            expected = played.models[4][of][tier]
            assert all((model.state_dict()[name] == x).all() for name, x in expected.items())
            best = open_models(stopped.folder).read(tier, of, "best")
            assert best.round == best_round(played.accuracy(of, tier)[:4])
    report = fedhen.report(stopped.folder, out=stopped.folder / "report")
    assert "Stopped: fedhen, seed 0 (run), after 4 of 8 rounds: finished by hand." in report
    assert "Unfinished" not in report and "Damaged" not in report
    shutil.rmtree(stopped.folder / "report")
    stopped.play(RESUME)
    assert same_run(played.folder, stopped.folder)


@pytest.mark.slow
def test_a_run_that_ends_between_evaluations_is_finished_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its models are those of round 3, its scores those of round 2; resumed, nothing is left of that."""
    every: dict[str, Any] = {"evaluation": {"every": 2}}
    whole = PlayedRun(tmp_path / "whole").play(rounds=5, **every)
    cut = PlayedRun(tmp_path / "cut").play(stop_after=3, rounds=5, **every)
    assert main(["finish", str(cut.folder)]) == 0
    said = capsys.readouterr().out
    assert "stopped after 3 of 5 rounds: finished by hand" in said
    assert "the scores are of round 2; `fedhen evaluate` scores the models of round 3" in said
    assert json.loads((cut.folder / "summary.json").read_text())["final"] == whole.records[1]["accuracy"]
    assert open_models(cut.folder).read("simple").round == 3
    cut.play(RESUME, rounds=5, **every)
    assert same_run(whole.folder, cut.folder)


def test_a_run_that_is_being_played_is_not_finished_by_hand(stopped: PlayedRun) -> None:
    before = lasting_files(stopped.folder)
    with lock_folder(stopped.folder), pytest.raises(FedhenError, match="in use by another process"):
        finish_run(stopped.folder)
    assert lasting_files(stopped.folder) == before and not (stopped.folder / "summary.json").exists()


@pytest.mark.slow
def test_best_models_from_python(tmp_path: Path) -> None:
    """Without a folder, and of a finished run that is resumed without a round to play."""
    settings: dict[str, Any] = {"rounds": 6, "devices": {"number": 8, "active": 2}, "evaluation": {"every": 1}}
    settings["training"] = {"lr": 0.3, "batch_size": 5}
    run = fedhen.train(frozen_body(), clusters(), accelerator="cpu", **settings)
    saved = fedhen.train(frozen_body(), clusters(), accelerator="cpu", out=tmp_path / "run", **settings)
    again = fedhen.resume(tmp_path / "run", family=frozen_body(), data=clusters(), accelerator="cpu")
    for each in (run, saved, again):
        for tier in TIERS:
            loaded = fedhen.load(tmp_path / "run", tier, "devices", "best", family=frozen_body())
            assert same_weights(each.model(tier, "devices", "best"), loaded.state_dict())
    with pytest.raises(FedhenError, match="unknown at 'first'"):
        run.model("simple", at="first")


def test_runs_without_scores_have_no_best_model(tmp_path: Path) -> None:
    data = clusters()
    unscored = fedhen.arrays(data.x, data.y)
    run = fedhen.train(
        frozen_body(), unscored, out=tmp_path / "run", rounds=1, devices={"number": 2, "active": 1}, accelerator="cpu"
    )
    with pytest.raises(FedhenError, match="has no best model: no round was scored"):
        fedhen.load(tmp_path / "run", "simple", at="best", family=frozen_body())
    with pytest.raises(FedhenError, match="has no best model"):
        run.model("simple", at="best")
