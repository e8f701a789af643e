"""Runs before observers: callbacks, and trackers whose stores are read back with their own readers."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import fedhen
from fedhen.cli import main
from fedhen.config import toml
from fedhen.experiment.build import build_experiment
from fedhen.experiment.observed import play_observed
from fedhen.tracking.observers import RunEnd, RunInfo
from support.families import two_exits
from support.marks import first_is_quick
from support.tiny import TINY_OPTIONS
from support.trackers import SMALL, Curves, data, read_mlflow, read_tensorboard, read_wandb

FIRST = ["run", "digits", "--accelerator", "cpu", "--quiet", "--set=checkpoint.rounds=2", *TINY_OPTIONS]


class Notes(fedhen.Observer):
    """Notes what it is told, and raises where it is asked to."""

    def __init__(self, raises: str = "") -> None:
        self.told: list[Any] = []
        self.raises = raises

    def start(self, run: RunInfo) -> None:
        self._note("start", run)

    def round(self, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        self._note(f"round {record['round']}", (record, timing))

    def end(self, run: RunEnd) -> None:
        self._note("end", run)

    def _note(self, what: str, value: Any) -> None:
        self.told.append((what, value))
        if what == self.raises:
            raise ConnectionError("no answer from http://me:hunter2@host")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.told]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected_curves(folder: Path) -> Curves:
    """What a tracker should have of a run, from its records alone."""
    curves: Curves = {}
    sent: dict[str, int] = {}
    for record, timing in zip(read_lines(folder / "rounds.jsonl"), read_lines(folder / "timing.jsonl"), strict=True):
        values = {"loss/training": record["loss"], "seconds/round": timing["total"]}
        if "accuracy" in record:  # not every round is evaluated
            values["distance/simple"] = record["distance"]["simple"]
            for owner, tier in product(("server", "devices"), ("simple", "complex")):
                values[f"accuracy/{owner}/{tier}"] = record["accuracy"][owner][tier]
        for tier in ("simple", "complex"):
            for way in ("down", "up"):
                key = f"bytes/{way}/{tier}"
                sent[key] = sent.get(key, 0) + record["bytes"][way][tier]
        for name, value in {**values, **sent}.items():
            curves.setdefault(name, []).append((record["round"], value))
    return curves


def same(found: Curves, expected: Curves) -> None:
    """TensorBoard keeps 32 bits of a number."""
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [v for _, v in found[name]] == pytest.approx([v for _, v in points], rel=1e-6), name


def test_callbacks_and_observers_are_told_in_order(tmp_path: Path) -> None:
    notes, called = Notes(), list[tuple[str, int, Any]]()

    def first(record: dict[str, Any]) -> None:
        called.append(("first", record["round"], len(notes.told)))
        record.clear()

    def second(record: dict[str, Any]) -> None:
        called.append(("second", record["round"], record))

    run = fedhen.train(
        two_exits(), data(), out=tmp_path / "run", rounds=2, callbacks=[first, second], track=[notes], **SMALL
    )
    assert [call[:2] for call in called] == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]
    # A callback has its own copy of the record, and comes after the trackers.
    assert [call[2] for call in called if call[0] == "second"] == run.rounds
    assert [call[2] for call in called if call[0] == "first"] == [2, 3]
    assert notes.names == ["start", "round 1", "round 2", "end"]
    start, end = notes.told[0][1], notes.told[-1][1]
    assert (start.name, start.rounds, start.after, start.folder) == ("fedhen", 2, 0, tmp_path / "run")
    assert start.settings["devices.active"] == 2 and start.metrics[0].name == "accuracy"
    assert (end.reason, end.error) == ("finished", None)
    assert end.summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    last = [path.name for path in end.models if not path.name.startswith("best-")]
    assert last == [f"{owner}-{tier}.safetensors" for owner in ("devices", "server") for tier in ("complex", "simple")]
    fedhen.resume(tmp_path / "run", family=two_exits(), data=data(), track=[notes], progress=False)
    assert len(notes.told) == 4, "nothing is told of a run that is finished already"


def test_callbacks_work_without_a_folder() -> None:
    notes, rounds = Notes(), list[int]()
    fedhen.train(
        two_exits(), data(), rounds=2, track=[notes], callbacks=[lambda record: rounds.append(record["round"])], **SMALL
    )
    assert rounds == [1, 2] and notes.names == ["start", "round 1", "round 2", "end"]
    assert notes.told[-1][1] == RunEnd()


@pytest.mark.parametrize("last", [False, True])
def test_a_callback_that_raises_ends_the_run_which_is_saved(last: bool, tmp_path: Path) -> None:
    """Even if no checkpoint was due. The run can be resumed, and then it is the run that was not interrupted."""
    notes, rounds = Notes(), 2 if last else 4
    rare = {**SMALL, "checkpoint": {"rounds": 0, "minutes": 60}}

    def raises(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise RuntimeError("the callback's own")

    with pytest.raises(RuntimeError, match="the callback's own") as raised:
        fedhen.train(
            two_exits(), data(), out=tmp_path / "run", rounds=rounds, callbacks=[raises], track=[notes], **rare
        )
    assert raised.traceback[-1].name == "raises" and raised.value.__cause__ is None
    assert notes.names == ["start", "round 1", "round 2", "end"]
    assert notes.told[-1][1].reason == "failed" and notes.told[-1][1].error is raised.value
    assert (tmp_path / "run" / "summary.json").is_file() == last
    assert (tmp_path / "run" / "checkpoints" / "round-000002.json").is_file()
    again = Notes()
    run = fedhen.resume(
        tmp_path / "run", family=two_exits(), data=data(), rounds=4, track=[again], accelerator="cpu", progress=False
    )
    assert again.names == ["start", "round 3", "round 4", "end"] and again.told[0][1].after == 2
    whole = fedhen.train(two_exits(), data(), out=tmp_path / "whole", rounds=4, **rare)
    assert run.rounds == whole.rounds


def test_a_run_whose_rounds_are_no_longer_taken_is_saved(tmp_path: Path) -> None:
    """As after `break`, although no checkpoint was due."""
    notes, cut = Notes(), tmp_path / "cut"
    whole = fedhen.train(
        two_exits(), data(), out=tmp_path / "whole", rounds=4, **{**SMALL, "checkpoint": {"rounds": 0, "minutes": 60}}
    )
    cut.mkdir()
    config = toml.read_toml(tmp_path / "whole" / "config.toml")
    experiment = build_experiment(config, data=data(), family=two_exits(), accelerator="cpu")
    for step in play_observed(cut, experiment, [notes]):
        if step.record["round"] == 2:
            break
    assert notes.names == ["start", "round 1", "round 2", "end"] and notes.told[-1][1].reason == "stopped"
    assert (cut / "checkpoints" / "round-000002.json").is_file()
    run = fedhen.resume(cut, family=two_exits(), data=data(), accelerator="cpu", progress=False)
    assert run.rounds == whole.rounds


@pytest.mark.parametrize("where", ["start", "round 1", "end"])
def test_a_tracker_that_fails_costs_one_line_and_no_run(where: str, tmp_path: Path) -> None:
    failing, other, rounds = Notes(where), Notes(), list[int]()
    with pytest.warns(UserWarning) as warned:
        run = fedhen.train(
            two_exits(),
            data(),
            out=tmp_path / "run",
            rounds=2,
            track=[failing, other],
            callbacks=[lambda record: rounds.append(record["round"])],
            **SMALL,
        )
    assert [str(warning.message) for warning in warned] == [
        "Notes has failed (ConnectionError: no answer from http://host): the run continues without it"
    ]
    assert failing.names[-1] == where, "it is dropped"
    assert other.names == ["start", "round 1", "round 2", "end"] and rounds == [1, 2] and len(run.rounds) == 2
    assert (tmp_path / "run" / "summary.json").is_file()


def test_trackers_change_no_byte_of_a_run(tmp_path: Path) -> None:
    watched: dict[str, Any] = {"track": ["tensorboard", Notes()], "callbacks": [print]}
    for name, more in {"plain": {}, "tracked": watched}.items():
        fedhen.train(two_exits(), data(), out=tmp_path / name, rounds=2, **more, **SMALL)
    for file in ("rounds.jsonl", "config.toml", *(f"models/server-{tier}.safetensors" for tier in two_exits().tiers)):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "tracked" / file).read_bytes(), file


@pytest.mark.parametrize("package", first_is_quick(["tensorboardX", "torch.utils.tensorboard"]))
def test_tensorboard_has_the_records_and_the_settings(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    if package != "tensorboardX":
        monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert main([*FIRST, "--rounds", "3", "--out", str(folder), "--track", "tensorboard"]) == 0
    curves, settings = read_tensorboard(folder / "tensorboard")
    same(curves, expected_curves(folder))
    assert settings["training.epochs"] == 1 and settings["recipe"] == "digits"
    assert json.loads(settings["model.widths"]) == [4, 4, 8, 8]


def test_tensorboard_shows_rounds_that_are_played_again_once(tmp_path: Path) -> None:
    """The run is stopped after round 3, and what came after its checkpoint of round 2 is removed, as by a power cut."""
    folder = tmp_path / "run"

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    every_two = {**SMALL, "checkpoint": {"rounds": 2}}
    with pytest.raises(KeyboardInterrupt):
        fedhen.train(two_exits(), data(), out=folder, rounds=4, track="tensorboard", callbacks=[stop], **every_two)
    assert [step for step, _ in read_tensorboard(folder / "tensorboard")[0]["seconds/round"]] == [1, 2, 3]
    fedhen.resume(folder, family=two_exits(), data=data(), track="tensorboard", accelerator="cpu", progress=False)
    assert len(list((folder / "tensorboard").iterdir())) == 2
    # With the seconds of the second time.
    same(read_tensorboard(folder / "tensorboard")[0], expected_curves(folder))


@pytest.mark.slow
def test_what_is_logged_afterwards_is_what_is_logged_live(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run with several seeds, first unfinished: what is missing is added when the run has more rounds."""
    live, later = tmp_path / "live", tmp_path / "later"
    options = [*FIRST, "--seeds", "0,1"]
    assert main([*options, "--rounds", "3", "--out", str(live), "--track", "tensorboard"]) == 0
    assert main([*options, "--rounds", "2", "--out", str(later)]) == 0
    capsys.readouterr()
    assert main(["log", str(later), "--to", "tensorboard"]) == 0
    first = f"{later / 'seed0'}: 2 rounds logged to tensorboard ({later / 'seed0' / 'tensorboard'})"
    assert capsys.readouterr().out.splitlines()[0] == first
    assert main([*options, "--rounds", "3", "--out", str(later), "--resume"]) == 0
    assert main(["log", str(later), "--to", "tensorboard"]) == 0
    assert main(["log", str(later / "seed1"), "--to", "tensorboard"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{later / 'seed1'}: tensorboard has all 3 rounds"
    for seed in ("seed0", "seed1"):
        curves, settings = read_tensorboard(later / seed / "tensorboard")
        same(curves, expected_curves(later / seed))
        of_live, settings_of_live = read_tensorboard(live / seed / "tensorboard")
        for each in (curves, of_live):
            del each["seconds/round"]
        assert curves == of_live
        assert settings == {**settings_of_live, "rounds": 2}, "those that the run had when it was logged first"


def test_a_run_that_starts_again_is_another_run_for_trackers(tmp_path: Path) -> None:
    fedhen.train(two_exits(), data(), out=tmp_path, rounds=3, track="tensorboard", **SMALL)
    fedhen.resume(
        tmp_path,
        family=two_exits(),
        data=data(),
        rounds=4,
        restart=True,
        track="tensorboard",
        accelerator="cpu",
        progress=False,
    )
    same(read_tensorboard(tmp_path / "tensorboard")[0], expected_curves(tmp_path))


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of MLflow: to make one takes seconds, and each test copies it."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.mark.slow
@pytest.mark.xdist_group("mlflow")
@pytest.mark.filterwarnings("always::UserWarning")
def test_mlflow_continues_its_run(
    empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that is away is left out; then the store beside the run folder gets all rounds, each once."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    folder = tmp_path / "run"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@127.0.0.1:{port}")
    assert main([*FIRST, "--rounds", "2", "--out", str(folder), "--track", "mlflow,tensorboard"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("fedhen: mlflow has failed")
        and f"log it later with: fedhen log {folder} --to mlflow" in line
        and "hunter2" not in line
    )
    assert "hunter2" not in "".join(p.read_text(errors="ignore") for p in folder.rglob("*") if p.is_file())

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    assert main(["resume", str(folder), "--rounds", "3", "--quiet", "--track", "mlflow", "--track", "tensorboard"]) == 0
    assert main(["resume", str(folder), "--rounds", "4", "--quiet"]) == 0
    ((run, curves, models),) = read_mlflow(tmp_path / "mlflow.db")
    assert [step for step, _ in curves["loss/training"]] == [1, 2, 3]
    assert main(["log", str(folder), "--to", "mlflow"]) == 0
    ((run, curves, models),) = read_mlflow(tmp_path / "mlflow.db")
    same(curves, expected_curves(folder))
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params["training.epochs"] == "1" and run.data.params["rounds"] == "3"
    assert run.data.tags["recipe"] == "digits" and run.data.tags["method"] == "fedhen"
    assert models == sorted(f"models/{path.name}" for path in (folder / "models").iterdir())
    artifact = next((tmp_path / "mlartifacts").rglob("server-simple.safetensors"))
    assert artifact.read_bytes() == (folder / "models" / "server-simple.safetensors").read_bytes()
    assert [step for step, _ in read_tensorboard(folder / "tensorboard")[0]["loss/training"]] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.xdist_group("mlflow")
def test_mlflow_starts_another_run_where_the_first_is_gone(empty_store: Path, tmp_path: Path) -> None:
    """The run folder was moved away from its store."""
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        shutil.copy(empty_store, tmp_path / place / "mlflow.db")
    fedhen.train(two_exits(), data(), out=tmp_path / "here" / "run", rounds=2, track="mlflow", **SMALL)
    shutil.move(tmp_path / "here" / "run", tmp_path / "there" / "run")
    fedhen.resume(
        tmp_path / "there" / "run",
        family=two_exits(),
        data=data(),
        rounds=3,
        track="mlflow",
        accelerator="cpu",
        progress=False,
    )
    for place, rounds in {"here": [1, 2], "there": [1, 2, 3]}.items():
        ((_, curves, _),) = read_mlflow(tmp_path / place / "mlflow.db")
        assert [step for step, _ in curves["loss/training"]] == rounds


@pytest.mark.slow
@pytest.mark.process
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, key = tmp_path / "run", "c4a4a97" * 6
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert main([*FIRST, "--rounds", "2", "--out", str(folder), "--track", "wandb"]) == 0
    assert main(["resume", str(folder), "--rounds", "3", "--quiet", "--track", "wandb"]) == 0
    records, curves = read_wandb(folder / "wandb")
    same(curves, expected_curves(folder))
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert len({run.run_id for run in runs}) == 1 and runs[0].project == "fedhen"
    assert runs[0].display_name == "run" and runs[0].run_group == "digits" and "method fedhen" in runs[0].tags
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["training.epochs"] == 1 and config["model.widths"] == [4, 4, 8, 8]
    artifacts = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    files = {entry.path for artifact in artifacts for entry in artifact.manifest.contents}
    assert files == {path.name for path in (folder / "models").iterdir()}
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or key.encode() not in path.read_bytes(), path
