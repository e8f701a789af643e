"""Models of runs that real processes play: while they are played, and after they are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import fedhen
from fedhen.errors import FedhenError
from fedhen.experiment.finish import finish_run
from support.kills import Forks, count_rounds, same_run, wait_for
from support.ranks import SIX_DEVICES, torchrun
from support.resumable import run_command

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as started:
        yield started


def load(folder: Path, tier: str, of: str, at: str = "last") -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".* is not finished: its models are of round \d+ of 100000")
        return fedhen.load(folder, tier, of, at)


def test_models_are_loaded_while_another_process_replaces_them(forks: Forks, tmp_path: Path) -> None:
    """Every round is saved and two are kept, so that files vanish while they are read. Nothing is locked."""
    folder, log = tmp_path / "run", tmp_path / "log"
    command = run_command(100_000, "checkpoint.rounds=1", "evaluation.every=1")
    playing = forks.start([*command, "--out", str(folder), "--quiet"], log)
    wait_for(lambda: any(folder.glob("checkpoints/round-*.json")))
    rounds: list[int] = []
    while len(set(rounds)) < 15:
        assert not playing.ended(), log.read_text()
        rounds.append(load(folder, "simple", "devices").round)
        assert load(folder, "complex", "server", "best").round <= count_rounds(folder)
    assert rounds == sorted(rounds)
    playing.kill(signal.SIGKILL)
    assert playing.wait() == -signal.SIGKILL

    # The same models as those of a run that was planned with these rounds.
    models = {of: load(folder, "simple", of) for of in ("server", "devices")}
    number = models["server"].round
    short = run_command(number, "checkpoint.rounds=0", "evaluation.every=1")
    assert forks.run([*short, "--out", str(tmp_path / "short"), "--quiet"], log)[0] == 0, log.read_text()
    for of, model in models.items():
        saved = load_file(tmp_path / "short" / "models" / f"{of}-simple.safetensors")
        state = model.state_dict()
        assert model.round == number and all(bool((state[name] == tensor).all()) for name, tensor in saved.items())


def test_a_killed_run_is_evaluated_reported_finished_and_resumed(forks: Forks, tmp_path: Path) -> None:
    command, folder, log = run_command(60, "evaluation.every=2"), tmp_path / "cut", tmp_path / "log"
    code, said = forks.run([*command, "--out", str(tmp_path / "whole"), "--quiet"], log)
    assert code == 0, said
    playing = forks.start([*command, "--out", str(folder), "--quiet"], log)
    wait_for(lambda: count_rounds(folder) >= 7 and any(folder.glob("checkpoints/round-*.json")))
    with pytest.raises(FedhenError, match="is in use by another process"):
        finish_run(folder)
    playing.kill()
    playing.wait()
    for command_line in (["evaluate", str(folder)], ["evaluate", str(folder), "--at=best", "--of=devices"]):
        code, said = forks.run(command_line, log)
        assert code == 0 and "is not finished: its models are of round" in said and "differs" not in said, said
    code, said = forks.run(["report", str(folder), "--out", str(tmp_path / "report")], log)
    assert code == 0 and "Unfinished: fedhen, seed 0 (cut)" in said, said
    code, said = forks.run(["finish", str(folder)], log)
    summary = json.loads((folder / "summary.json").read_text())
    assert code == 0 and f"stopped after {summary['rounds']} of 60 rounds: finished by hand" in said, said
    code, said = forks.run(["evaluate", str(folder)], log)
    assert code == 0 and "differs" not in said and "not finished" not in said
    assert forks.run(["resume", str(folder), "--quiet"], log)[0] == 0
    assert same_run(tmp_path / "whole", folder)


def test_two_ranks_stop_together_and_continue(tmp_path: Path) -> None:
    """Both decide by the scores of rank 0, and rank 0 writes the best models."""
    command = ["-m", "fedhen", "run", "digits", "--rounds=12", *SIX_DEVICES, "--quiet", "--patience=1", "--out"]
    subprocess.run(torchrun(2, *command, str(tmp_path / "run")), check=True, timeout=240)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped"]["reason"] == "no improvement in 1 evaluation" and summary["rounds"] < 12
    assert count_rounds(tmp_path / "run") == summary["rounds"]
    resume = ["-m", "fedhen", "resume", str(tmp_path / "run"), "--quiet", "--patience=0"]
    subprocess.run(torchrun(2, *resume), check=True, timeout=240)
    whole = [*command[:-2], "--out", str(tmp_path / "whole")]
    subprocess.run(torchrun(2, *whole), check=True, timeout=240)
    assert same_run(tmp_path / "whole", tmp_path / "run")
