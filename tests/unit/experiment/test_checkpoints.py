"""Checkpoints in one process: what is in them, what is refused, and what is resumed from them."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedhen
from fedhen.cli import main
from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.config.training_settings import TrainingConfig
from fedhen.errors import FedhenError
from fedhen.experiment import checkpoint_files, checkpoint_state
from fedhen.experiment.build import build_experiment
from fedhen.experiment.checkpoint_files import DamagedCheckpoint, Entry, TensorSpec, spec_of
from fedhen.experiment.evaluation import plan_passes
from fedhen.experiment.experiment import Experiment
from fedhen.experiment.resume import ResumePolicy, check_same_settings, flatten_settings
from fedhen.experiment.runner import play_run
from fedhen.interrupts import RoundAbandoned, RunStopped, StopRequest
from fedhen.models.model_files import model_path
from support.families import two_exits
from support.forging import forge_checkpoint
from support.kills import lasting_files, same_run
from support.marks import first_is_quick

RESUME = ResumePolicy(resume=True)
SETTINGS: dict[str, Any] = {"devices": {"active": 4}, "evaluation": {"every": 2}, "checkpoint": {"rounds": 2}}


def data(change: Callable[[list[Any]], None] = lambda arrays: None) -> fedhen.Data:
    rng = np.random.default_rng(0)
    arrays: list[Any] = [
        rng.normal(size=(60, 6)),
        rng.integers(0, 3, 60),
        rng.normal(size=(30, 6)),
        rng.integers(0, 3, 30),
    ]
    change(arrays)
    x, y, x_test, y_test = arrays
    return fedhen.arrays(x, y, x_test, y_test, classes=3)


def train(out: Path, **settings: Any) -> fedhen.Trained:
    merged = {**SETTINGS, "rounds": 8, **settings}
    merged["devices"] = {"number": 10, **merged["devices"]}
    return fedhen.train(two_exits(), data(), out=out, accelerator="cpu", **merged)


def again(folder: Path) -> Experiment:
    """The experiment of a folder, before its first round."""
    config = toml.read_toml(folder / "config.toml")
    return build_experiment(config, data=data(), family=two_exits(), accelerator="cpu")


def resumed(folder: Path, **more: Any) -> fedhen.Trained:
    given: dict[str, Any] = {"family": two_exits(), "data": data(), "accelerator": "cpu", **more}
    return fedhen.resume(folder, activate=lambda number, losses: [number, 9 - number], **given)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as it is after its sixth round of eight: two checkpoints, and lines of one round more."""

    class Crash(Exception):
        pass

    def activate(number: int, losses: object) -> list[int]:
        if number == 8:
            raise Crash
        return [number, 9 - number]

    folder = tmp_path_factory.mktemp("unfinished") / "run"
    with pytest.raises(Crash):
        train(folder, activate=activate)
    assert checkpoint_files.list_rounds(folder / "checkpoints") == [6, 4]
    return folder


@pytest.fixture
def folder(unfinished: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may change."""
    return shutil.copytree(unfinished, tmp_path / "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without the crash."""
    folder = tmp_path_factory.mktemp("trained") / "whole"
    train(folder, activate=lambda number, losses: [number, 9 - number])
    return folder


@pytest.fixture
def whole(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may change."""
    return shutil.copytree(trained, tmp_path / "whole")


OPTIMISERS: dict[str, dict[str, Any]] = {
    "default": {},
    "momentum": {"training": {"momentum": 0.9, "optimizer_state": "device"}, "server": {"optimizer": "momentum"}},
    "adamw": {
        "training": {"optimizer": "adamw", "lr": 0.01, "optimizer_state": "device"},
        "server": {"optimizer": "adam", "lr": 0.1},
    },
}


@pytest.mark.parametrize("local", first_is_quick(["feddyn", "plain"]))
@pytest.mark.parametrize("optimisers", first_is_quick([*OPTIMISERS]))
@pytest.mark.parametrize("rows", first_is_quick(["disk", "host"]))
def test_a_run_from_python_is_resumed_to_the_same_bytes(local: str, rows: str, optimisers: str, tmp_path: Path) -> None:
    """Own family, own data, own activation; the result has all rounds, and its models."""

    def activate(number: int, losses: Any) -> list[int]:
        if number == 6 and not activate.__dict__.setdefault("crashed", False):
            activate.__dict__["crashed"] = True
            raise KeyboardInterrupt
        return sorted(range(10), key=lambda device: losses.get(device, 9.0))[:4]

    settings: dict[str, Any] = {"local": {"name": local}, "runtime": {"storage": rows, "storage_dir": str(tmp_path)}}
    settings |= OPTIMISERS[optimisers]
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", activate=activate, **settings)
    expected = train(tmp_path / "whole", activate=activate, **settings)
    run = fedhen.resume(tmp_path / "cut", family=two_exits(), data=data(), activate=activate, accelerator="cpu")
    assert same_run(tmp_path / "whole", tmp_path / "cut")
    assert run.rounds == expected.rounds and run.accuracy == expected.accuracy and len(run.rounds) == 8
    x = data().x_test.double()
    assert torch.equal(run.model("complex")(x)[-1], expected.model("complex")(x)[-1])
    finished = fedhen.resume(tmp_path / "cut", family=two_exits(), data=data(), accelerator="cpu")
    assert finished.rounds == expected.rounds
    assert torch.equal(finished.model("simple", "devices")(x)[0], expected.model("simple", "devices")(x)[0])


@pytest.mark.slow
def test_a_checkpoint_has_the_states_of_the_optimisers_and_nothing_new_without_them(tmp_path: Path) -> None:
    """The simple model has weights of 5×6, 5, 3×5 and 3: 53 numbers in four tensors.

    Adam keeps two moments of each and four counts: 110 numbers. The server's two are there once for what tiers share.
    """
    train(tmp_path / "plain")
    train(tmp_path / "kept", **OPTIMISERS["adamw"])
    plain, kept = (checkpoint_files.open_checkpoint(tmp_path / n / "checkpoints", 8) for n in ("plain", "kept"))

    def parts(saved: checkpoint_files.Checkpoint) -> set[str]:
        return {name.partition(".")[0] for name in saved.kinds()} - {"best-server", "best-devices"}

    assert parts(plain) == {"server", "rows", "heard", "losses"} and plain.manifest["shelves"]["memory"] == []
    assert plain.manifest["sharing"].keys() - {"best-server", "best-devices"} == {"server", "mean"}
    assert parts(kept) == {*("server", "moments", "rows", "memory", "heard", "losses")}
    simple = next(device for device, _ in kept.manifest["shelves"]["memory"] if device < 5)
    assert kept.kinds()[f"memory.{simple}"][0] == [2 * 53 + 4]
    names = [name for name in kept.kinds() if name.startswith("moments.")]
    assert len(names) == 2 * len(again(tmp_path / "kept").server["complex"])


def test_tiers_share_tensors_again_after_a_resume(tmp_path: Path) -> None:
    """One tensor in the file, one in memory: the passes that score the models stay as few."""
    train(tmp_path / "run")
    before, after = again(tmp_path / "run"), again(tmp_path / "run")
    saved = checkpoint_files.open_checkpoint(tmp_path / "run" / "checkpoints", 8)
    after.restore(
        checkpoint_state.restore_state(saved, checkpoint_state.check_checkpoint(saved, after.state()), after.state())
    )
    shared = [name for name in after.server["simple"] if after.server["simple"][name] is after.server["complex"][name]]
    assert shared == list(after.server["simple"]) and after.played == 8
    assert plan_passes(after.server, after.population.family) == plan_passes(before.server, before.population.family)
    names = [name for name in saved.kinds() if name.startswith("server.")]
    assert len(names) == len(after.server["complex"])


@pytest.mark.slow
def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """600 positions: a third each in the manifest, in the header of the tensors and in the tensors."""
    train(tmp_path / "run", rounds=2)
    place = tmp_path / "run" / "checkpoints"
    manifest, tensors = (place / f"round-000002.{end}" for end in ("json", "safetensors"))
    header = 8 + int.from_bytes(tensors.read_bytes()[:8], "little")
    rng = random.Random(0)
    wanted = [(manifest, 0, manifest.stat().st_size), (tensors, 0, header), (tensors, header, tensors.stat().st_size)]
    assert checkpoint_files.open_checkpoint(place, 2).round == 2
    for path, begin, end in wanted:
        right = path.read_bytes()
        for position in [begin, end - 1, *(rng.randrange(begin, end) for _ in range(198))]:
            wrong = bytearray(right)
            wrong[position] ^= 1 << rng.randrange(8)
            path.write_bytes(wrong)
            with pytest.raises(DamagedCheckpoint):
                checkpoint_files.open_checkpoint(place, 2)
        for length in (0, 1, len(right) // 2, len(right) - 1):
            path.write_bytes(right[:length])
            with pytest.raises(DamagedCheckpoint):
                checkpoint_files.open_checkpoint(place, 2)
        path.write_bytes(right + b" ")
        with pytest.raises(DamagedCheckpoint):
            checkpoint_files.open_checkpoint(place, 2)
        path.write_bytes(right)
    assert checkpoint_files.open_checkpoint(place, 2).round == 2


@pytest.mark.parametrize("damage", first_is_quick(["flip", "truncate", "missing", "no rounds", "an odd round"]))
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage: str, whole: Path, folder: Path) -> None:
    path = folder / "checkpoints" / "round-000006.safetensors"
    if damage == "flip":
        path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "missing":
        path.unlink()
    else:
        path = folder / "rounds.jsonl"
        last = '{"round": 6, "act' if damage == "no rounds" else '{"round": 6}\n'
        path.write_text("\n".join(path.read_text().splitlines()[:5]) + "\n" + last)
    with pytest.warns(UserWarning, match="the checkpoint of round 6 cannot be used: .*; continuing from round 4"):
        resumed(folder)
    assert same_run(whole, folder)


def test_a_run_without_a_good_checkpoint_is_restarted_only_on_request(whole: Path, folder: Path) -> None:
    for path in folder.glob("checkpoints/*.safetensors"):
        path.write_bytes(b"")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(FedhenError, match=r"round 6 cannot be used: .*round 4 cannot be used: .*--restart"):
        resumed(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    resumed(folder, restart=True)
    assert same_run(whole, folder)


def test_a_finished_run_without_a_checkpoint_is_restarted_only_on_request(whole: Path) -> None:
    shutil.rmtree(whole / "checkpoints")
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    with pytest.raises(FedhenError, match="is finished and has no checkpoint"):
        resumed(whole, rounds=9)
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_torn_and_later_lines_are_cut_off(whole: Path, folder: Path) -> None:
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 7
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 8, "active": [1')
    (folder / "timing.jsonl").write_text("".join((folder / "timing.jsonl").read_text().splitlines(True)[:5]))
    resumed(folder)
    assert same_run(whole, folder), "also the line of times that was not written yet when the crash came"


CHANGES: list[tuple[str, Callable[[list[Any]], None]]] = [
    ("training inputs", lambda arrays: arrays[0].__setitem__((3, 2), 0.5)),
    ("training labels", lambda arrays: arrays[1].__setitem__(7, 2 - arrays[1][7] // 2)),
    ("test inputs", lambda arrays: arrays[2].__setitem__((29, 5), -1.0)),
    ("test labels", lambda arrays: arrays[3].__setitem__(0, (arrays[3][0] + 1) % 3)),
]


@pytest.mark.parametrize(("part", "change"), CHANGES)
def test_other_data_is_refused_by_name(part: str, change: Callable[[list[Any]], None], folder: Path) -> None:
    with pytest.raises(FedhenError, match=f"has changed since its checkpoint: {part}; use the same data"):
        resumed(folder, data=data(change))
    other = two_exits()
    with pytest.raises(FedhenError, match="has another configuration: seed is 1, was 0"):
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace("seed = 0", "seed = 1"))
        resumed(folder, family=other)


def test_a_checkpoint_older_than_a_setting_can_be_used() -> None:
    """It was made with what is now the default."""
    older = {key: value for key, value in flatten_settings(Config()).items() if key != "training.lr_warmup"}
    check_same_settings(Config(), older, "it")
    with pytest.raises(FedhenError, match=r"training.lr_warmup is 5, was 0"):
        check_same_settings(Config(training=TrainingConfig(lr_warmup=5)), older, "it")


def swapped(name: str, tensor: torch.Tensor) -> Callable[[dict[str, Any], list[Entry]], None]:
    def change(about: dict[str, Any], entries: list[Entry]) -> None:
        place = next((k for k, entry in enumerate(entries) if entry.name == name), len(entries))
        entries[place : place + 1] = [Entry(name, spec_of(tensor), lambda: tensor)]

    return change


HOSTILE: Sequence[tuple[str, Callable[[dict[str, Any], list[Entry]], Any]]] = [
    ("shape", swapped("server.0", torch.zeros(10_000))),
    ("type", swapped("losses", torch.zeros(6, dtype=torch.float32))),
    ("unexpected", swapped("../../stranger", torch.zeros(3))),
    ("missing", lambda about, entries: entries.pop()),
    ("tiers", lambda about, entries: about["sharing"]["server"].pop("simple")),
    ("numbers", lambda about, entries: about["sharing"]["server"]["simple"].update({"a.weight": "0"})),
    ("devices", lambda about, entries: about["shelves"]["rows"].append([10, 0])),
    ("order", lambda about, entries: about["shelves"]["rows"].reverse()),
    ("losses", swapped("heard", torch.tensor([0, 1, 2, 3, 4, 99]))),
    ("manifest", lambda about, entries: about.update(shelves=None)),
    ("standing", lambda about, entries: about.update(standing=[])),
    ("best round", lambda about, entries: about["standing"]["best"]["server"].update(simple=[7, 0.5])),
    ("best owner", lambda about, entries: about["standing"]["best"].update(stranger={})),
    ("best part", lambda about, entries: about["standing"].update(best={"server": {"simple": [1, 0.5]}})),
    ("times", lambda about, entries: about.update(seconds=float("nan"))),
    ("config", lambda about, entries: about.pop("config")),
    ("config", lambda about, entries: about.update(config="rounds")),
    ("config", lambda about, entries: about.update(config={})),
]


@pytest.mark.parametrize(("name", "change"), first_is_quick(HOSTILE))
def test_a_checkpoint_with_right_checksums_is_still_compared(
    name: str, change: Callable[[dict[str, Any], list[Entry]], None], whole: Path, folder: Path, tmp_path: Path
) -> None:
    """Names, shapes, types and devices must be the run's own; else the one before is taken."""
    forge_checkpoint(folder, 6, change)
    outside = sorted(path.name for path in tmp_path.iterdir())
    with pytest.warns(UserWarning, match="the checkpoint of round 6 cannot be used"):
        resumed(folder)
    assert same_run(whole, folder) and sorted(path.name for path in tmp_path.iterdir()) == outside


def test_a_rewritten_checkpoint_with_the_same_content_is_used(whole: Path, folder: Path) -> None:
    """So that the refusals above are of what they change."""
    forge_checkpoint(folder, 6, lambda about, entries: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="tier ")
        resumed(folder)
    assert same_run(whole, folder)


def test_a_checkpoint_from_before_there_were_best_models_is_used(whole: Path, folder: Path) -> None:
    """The best of the rounds since then is kept."""

    def age(about: dict[str, Any], entries: list[Entry]) -> None:
        del about["standing"]
        about["sharing"] = {part: tiers for part, tiers in about["sharing"].items() if not part.startswith("best-")}
        entries[:] = [entry for entry in entries if not entry.name.startswith("best-")]
        for path in (folder / "checkpoints").glob("start.*"):
            path.unlink()

    forge_checkpoint(folder, 6, age)
    resumed(folder)
    assert (folder / "rounds.jsonl").read_bytes() == (whole / "rounds.jsonl").read_bytes()
    best = json.loads((folder / "summary.json").read_text())["best_rounds"]
    assert {number for tiers in best.values() for number in tiers.values()} == {8}
    assert (folder / "checkpoints" / "start.json").is_file()


def test_pickles_and_monstrous_headers_are_not_read(folder: Path) -> None:
    """The checksum of the file may be right: safetensors reads its header, and nothing else does."""
    import hashlib
    import pickle

    place = folder / "checkpoints"
    huge = json.dumps({"server.0": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}}).encode()
    for bad in (pickle.dumps({"server.0": 1}), (2**62).to_bytes(8, "little"), len(huge).to_bytes(8, "little") + huge):
        (place / "round-000006.safetensors").write_bytes(bad)
        manifest = dict(checkpoint_files.open_checkpoint(place, 4).manifest)
        manifest.pop("check")
        manifest |= {"round": 6, "bytes": len(bad), "sha256": hashlib.sha256(bad).hexdigest()}
        (place / "round-000006.json").write_bytes(checkpoint_files._render_manifest(manifest))
        with pytest.raises(DamagedCheckpoint):
            checkpoint_state.check_checkpoint(checkpoint_files.open_checkpoint(place, 6), again(folder).state())


def test_a_disk_that_cannot_be_written_does_not_end_the_run(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    experiment = again(whole)
    experiment.activate = lambda number, losses: [number, 9 - number]
    (folder / "checkpoints").write_text("in the way")
    with pytest.warns(UserWarning, match=r"round \d could not be saved .*: the run continues"):
        assert len(list(play_run(folder, experiment))) == 8
    rounds = [(f / "rounds.jsonl").read_bytes() for f in (folder, whole)]
    assert rounds[0] == rounds[1] and model_path(folder, "server", "simple").is_file()


def test_the_folder_is_held_while_a_checkpoint_is_written(whole: Path, tmp_path: Path) -> None:
    """A run in Python that is interrupted has let go of its folder only when nothing writes into it any more."""
    (tmp_path / "run").mkdir()
    steps = play_run(tmp_path / "run", again(whole))
    next(steps), next(steps)
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"] == []
    assert checkpoint_files.list_rounds(tmp_path / "run" / "checkpoints") == [2]


def test_stopping_on_a_full_disk_reports_what_is_saved(whole: Path, tmp_path: Path) -> None:
    """Rounds 2 and 4 are saved, then something is in the way."""
    (tmp_path / "run").mkdir()
    stop = StopRequest()
    steps = play_run(tmp_path / "run", again(whole), stop=stop)
    for _ in range(4):
        next(steps)
    with pytest.warns(UserWarning, match="round 5 could not be saved"), pytest.raises(RunStopped) as told:
        for step in steps:
            if step.record["round"] == 5:
                place = tmp_path / "run" / "checkpoints"
                for thread in threading.enumerate():
                    if thread.name == "checkpoint":
                        thread.join()
                place.rename(tmp_path / "away")
                place.write_text("in the way")
                stop.signal = signal.SIGINT
    assert str(told.value).startswith("stopped after round 5, of which 4 are saved; resume with: fedhen resume ")


@pytest.mark.slow
def test_a_round_can_be_undone_at_any_point(tmp_path: Path) -> None:
    """Thrown out of the scoring, when server, last models and memories are already those of the next round."""
    train(tmp_path / "whole", local={"name": "scaffold"})
    config = (tmp_path / "whole" / "config.toml").read_text()
    (tmp_path / "cut").mkdir()
    experiment, stop = again(tmp_path / "whole"), StopRequest()
    score = experiment.engine.score

    def interrupted(passes: Any) -> Any:
        if experiment.played == 5:
            stop.signal = signal.SIGTERM
            raise RoundAbandoned
        return score(passes)

    experiment.engine = replace(experiment.engine, score=interrupted)
    with pytest.raises(RunStopped, match="stopped after round 5; resume with"):
        list(play_run(tmp_path / "cut", experiment, stop=stop))
    assert checkpoint_files.list_rounds(tmp_path / "cut" / "checkpoints") == [5, 4]
    list(play_run(tmp_path / "cut", again(tmp_path / "whole"), RESUME))
    assert same_run(tmp_path / "whole", tmp_path / "cut") and (tmp_path / "cut" / "config.toml").read_text() == config


@pytest.mark.slow
def test_no_checkpoints_are_written_if_they_are_turned_off(tmp_path: Path) -> None:
    train(tmp_path / "run", checkpoint={"minutes": 0, "rounds": 0})
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert all("save" not in json.loads(line) for line in (tmp_path / "run" / "timing.jsonl").open())
    assert Config().checkpoint.wanted


def test_resume_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(tmp_path)]) == 2 and "is not a run folder" in capsys.readouterr().err
    train(tmp_path / "run", rounds=2)
    assert main(["resume", str(tmp_path / "run"), "--rounds", "4"]) == 2
    assert "was passed from Python" in capsys.readouterr().err
    assert main(["run", "digits", "--resume", "--force", "--out", str(tmp_path / "x")]) == 2
    assert main(["paper", "--resume", "--runs", str(tmp_path)]) == 2
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("mine")
    assert main(["run", "digits", "--resume", "--out", str(tmp_path / "thesis")]) == 2
    assert "does not hold a run" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert TensorSpec((2, 3), torch.float32).bytes == 24 and lasting_files(tmp_path / "run")
