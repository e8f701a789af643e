"""Interrupted runs go on as if nothing had happened: real processes, killed at random moments."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fedhen.fileio.locks import lock_folder
from support.kills import Forks, Started, count_rounds, play_with_kills, same_run, wait_for
from support.ranks import SIX_DEVICES, children, fedhen_lines, torchrun
from support.resumable import RUNS_TO_KILL, run_command

pytestmark = pytest.mark.process

SLOW = """\
import signal, time
from pathlib import Path
from fedhen.algorithm.methods import Method
from fedhen.algorithm.merging import share_common_weights
from torch.nn.functional import cross_entropy

here = Path(__file__).parent

def objective(logits, labels):
    recorded, is_training = here / "cut" / "rounds.jsonl", len(labels) == 4
    if is_training and (here / "slow").exists() and recorded.is_file() and recorded.read_text().count("\\n") == 4:
        (here / "begun").touch()
        for _ in range(6000):
            time.sleep(0.01)
            if signal.getitimer(signal.ITIMER_REAL)[0]:
                (here / "told").touch()
    return cross_entropy(logits[-1], labels)

MINE = Method("slow", objective, share_common_weights)
"""
"""Each of the fifth round's batches of four takes a minute: the round outlasts every time-out.

Told to stop, the process has a timer for the round under way. Before the rounds it is called with two images, to see
which weights it trains.
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as started:
        yield started


def played(forks: Forks, command: list[str], folder: Path) -> Path:
    code, said = forks.run([*command, "--out", str(folder), "--quiet"], folder.with_suffix(".log"))
    assert code == 0, said
    return folder


def stopped_after(forks: Forks, command: list[str], folder: Path, rounds: int, number: int = signal.SIGKILL) -> Started:
    """A process that got a signal when so many rounds were recorded."""
    started = forks.start([*command, "--out", str(folder), "--quiet"], folder.with_suffix(".log"))
    while count_rounds(folder) < rounds:
        assert not started.ended(), started.log.read_text()
        time.sleep(0.001)
    started.kill(number)
    return started


@pytest.mark.parametrize(
    ("kind", "kills"),
    {
        **{"plain": 7, "scaffold": 7, "optimisers, coded": 6, "by loss and time": 6, "private": 20},
        **{"ditto": 4, "fedrep": 4},
    }.items(),
)
def test_a_run_that_is_killed_again_and_again_gives_the_same_bytes(
    kind: str, kills: int, forks: Forks, tmp_path: Path
) -> None:
    """While rounds are played, while a checkpoint is written, and while the process starts."""
    command = run_command(120, *RUNS_TO_KILL[kind])
    whole = played(forks, command, tmp_path / "whole")
    moments = play_with_kills(forks, command, tmp_path / "cut", kills, random.Random(kills))
    assert sum(moments.values()) == kills and len(moments) >= 3
    assert same_run(whole, tmp_path / "cut")
    assert "resumed" in json.loads((tmp_path / "cut" / "environment.json").read_text())


def test_a_killed_command_is_resumed_and_a_second_process_is_refused(tmp_path: Path) -> None:
    """`python -m fedhen run`, killed, then `python -m fedhen resume`; a second process is refused meanwhile."""
    command = [sys.executable, "-m", "fedhen", *run_command(100_000), "--out", str(tmp_path / "run"), "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process, ExitStack() as always:
        always.callback(process.kill)
        while count_rounds(tmp_path / "run") < 5:
            assert process.poll() is None
            time.sleep(0.01)
        resume = [sys.executable, "-m", "fedhen", "resume", str(tmp_path / "run")]
        second = subprocess.run(resume, capture_output=True, text=True, check=False)
        assert second.returncode == 2 and "is in use by another process" in second.stderr, second.stderr
        again = subprocess.run([*command, "--force"], capture_output=True, text=True, check=False)
        assert again.returncode == 2 and "is in use by another process" in again.stderr, again.stderr
        assert process.poll() is None and count_rounds(tmp_path / "run") >= 5
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
        assert process.stderr is not None
        rounds = count_rounds(tmp_path / "run")
        assert f"stopped after round {rounds}; resume with: fedhen resume {tmp_path / 'run'}" in process.stderr.read()


def test_the_first_signal_saves_the_last_whole_round(forks: Forks, tmp_path: Path) -> None:
    """By time alone there would be no checkpoint yet; a quick round is waited for."""
    command = run_command(40, "checkpoint.rounds=0")
    whole = played(forks, command, tmp_path / "whole")
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        folder = tmp_path / str(code)
        begun = stopped_after(forks, command, folder, 7, number)
        assert begun.wait() == code
        rounds = count_rounds(folder)
        stopped = f"fedhen: stopped after round {rounds}; resume with: fedhen resume {folder}\n"
        # A slow disk is told of.
        assert re.fullmatch(
            rf"(fedhen: round {rounds} is being saved; .*\n)?{re.escape(stopped)}", begun.log.read_text()
        )
        assert 7 <= rounds < 40 and (folder / "checkpoints" / f"round-{rounds:06}.json").is_file()
        assert forks.run(["resume", str(folder)], begun.log)[0] == 0
        assert same_run(whole, folder)


def test_a_long_round_is_abandoned_without_a_trace(forks: Forks, tmp_path: Path) -> None:
    """Some of its devices have trained, and remember it (SCAFFOLD): that must be taken back."""
    (tmp_path / "mine.py").write_text(SLOW)
    command = run_command(12, "local.name=scaffold", "checkpoint.rounds=0", "devices.active=8")
    command += ["--method", f"{tmp_path / 'mine.py'}:MINE", "--set=training.batch_size=4"]
    whole = played(forks, command, tmp_path / "whole")
    folder, slow, log = tmp_path / "cut", tmp_path / "slow", tmp_path / "log"
    slow.touch()

    def in_the_long_round(command: list[str]) -> Started:
        (tmp_path / "begun").unlink(missing_ok=True)
        started = forks.start([*command, "--quiet"], log)
        while not (tmp_path / "begun").exists():
            assert not started.ended(), log.read_text()
            time.sleep(0.01)
        return started

    begun = in_the_long_round([*command, "--out", str(folder)])
    told = time.monotonic()
    begun.kill(signal.SIGTERM)
    assert begun.wait() == 143 and time.monotonic() - told > 2.5, "a round that ends within three seconds is waited for"
    assert count_rounds(folder) == 4 and "stopped after round 4" in log.read_text()
    assert (folder / "checkpoints" / "round-000004.json").is_file()
    (tmp_path / "told").unlink()
    resume = ["resume", str(folder), "--method", f"{tmp_path / 'mine.py'}:MINE"]
    again = in_the_long_round(resume)
    again.kill(signal.SIGINT)
    while not (tmp_path / "told").exists():
        assert not again.ended(), log.read_text()
        time.sleep(0.01)
    again.kill(signal.SIGINT)
    assert again.wait() == 130 and log.read_text() == "fedhen: stopped\n", "a second Ctrl-C ends at once"
    slow.unlink()
    assert forks.run([*resume, "--quiet"], log)[0] == 0
    assert same_run(whole, folder)
    (tmp_path / "mine.py").write_text(SLOW + "\n")
    code, said = forks.run([*resume, "--rounds", "14"], log)
    assert code == 2 and "has changed since its checkpoint: method's file" in said


def test_a_run_killed_before_its_first_checkpoint_starts_again(forks: Forks, tmp_path: Path) -> None:
    command = run_command(60, "checkpoint.rounds=0")
    whole = played(forks, command, tmp_path / "whole")
    assert stopped_after(forks, command, tmp_path / "cut", 4).wait() == -signal.SIGKILL
    code, said = forks.run(["resume", str(tmp_path / "cut"), "--quiet"], tmp_path / "log")
    assert code == 0 and "has no checkpoint yet: it starts again at round 1" in said
    assert same_run(whole, tmp_path / "cut")


def test_rounds_can_be_added_to_a_finished_run(forks: Forks, tmp_path: Path) -> None:
    whole, short = played(forks, run_command(9), tmp_path / "whole"), played(forks, run_command(5), tmp_path / "short")
    resume, log = ["resume", str(short)], tmp_path / "log"
    before = {path: path.read_bytes() for path in short.rglob("*") if path.is_file()}
    code, said = forks.run(resume, log)
    assert code == 0 and f"{short} is finished" in said
    for wrong in (["--rounds", "4"], ["--rounds", "0"], ["--rounds", "x"]):
        assert forks.run([*resume, *wrong], log)[0] == 2
    assert before == {path: path.read_bytes() for path in short.rglob("*") if path.is_file()}
    assert forks.run([*resume, "--rounds", "9"], log)[0] == 0
    assert same_run(whole, short) and (short / "config.toml").read_bytes() == (whole / "config.toml").read_bytes()
    cosine = played(forks, run_command(3, "training.lr_schedule=cosine"), tmp_path / "cosine")
    code, said = forks.run(["resume", str(cosine), "--rounds", "4"], log)
    assert code == 2 and "falls along a cosine over 3 rounds" in said
    assert json.loads((cosine / "summary.json").read_text())["rounds"] == 3


def test_other_settings_are_refused_by_name(forks: Forks, tmp_path: Path) -> None:
    command, folder, log = run_command(300), tmp_path / "run", tmp_path / "log"
    assert stopped_after(forks, command, folder, 5).wait() == -signal.SIGKILL
    other = [*command, "--set=training.lr=0.05", "--set=local.name=fedprox", "--out", str(folder), "--resume"]
    code, said = forks.run(other, log)
    assert code == 2 and 'local.name is "fedprox", was "plain"; training.lr is 0.05, was 0.1' in said
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("clip = 10.0", "clip = 9.0"))
    code, said = forks.run(["resume", str(folder)], log)
    assert code == 2 and "training.clip is 9.0, was 10.0" in said and said.count("\n") == 1
    (folder / "config.toml").write_text(config.replace("minutes = 5.0", "minutes = 1.0"))
    with lock_folder(folder):
        code, said = forks.run(["resume", str(folder)], log)
    assert code == 2 and "another process" in said, "what does not count as a difference gets as far as the lock"


def test_a_comparison_is_resumed(forks: Forks, tmp_path: Path) -> None:
    """The first run is finished, the second one cut, the third has not begun."""
    command = ["compare", *run_command(40)[1:]]
    whole = played(forks, command, tmp_path / "whole")
    cut = tmp_path / "cut"
    shutil.copytree(whole / "fedhen", cut / "fedhen")
    stopped = stopped_after(forks, ["run", "--method=noside", *run_command(40)[1:]], cut / "noside", 3)
    assert stopped.wait() == -signal.SIGKILL
    shutil.move(cut / "noside.log", tmp_path)
    stamp = (cut / "fedhen" / "rounds.jsonl").stat().st_mtime_ns
    assert forks.run([*command, "--out", str(cut)], tmp_path / "log")[0] == 2, "not without --resume"
    code, said = forks.run([*command, "--out", str(cut), "--resume", "--quiet"], tmp_path / "log")
    assert code == 0 and "Rounds to target" in said
    assert all(same_run(whole / method, cut / method) for method in ("fedhen", "noside", "decouple"))
    assert (cut / "fedhen" / "rounds.jsonl").stat().st_mtime_ns == stamp


def interrupted(command: list[str], folder: Path, interrupt: Callable[[subprocess.Popen[str]], None]) -> list[str]:
    """What fedhen said of a run of two ranks that ended with this after nine rounds."""
    with (
        subprocess.Popen(
            torchrun(2, *command, str(folder)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
        ExitStack() as always,
    ):
        always.callback(process.terminate)
        wait_for(lambda: count_rounds(folder) >= 9)
        interrupt(process)
        errors = process.communicate(timeout=240)[1]
    assert process.returncode != 0 and count_rounds(folder) < 40
    return fedhen_lines(errors)


def test_a_run_of_two_ranks_is_resumed_by_two_and_by_one(forks: Forks, tmp_path: Path) -> None:
    """One of them is killed, or both are told to stop; what each had of the devices' memories is in the checkpoint."""
    settings = [*SIX_DEVICES, "--set=local.name=scaffold", "--set=checkpoint.rounds=2"]
    command = ["-m", "fedhen", "run", "digits", "--rounds", "40", *settings, "--quiet", "--out"]
    subprocess.run(torchrun(2, *command, str(tmp_path / "whole")), check=True, timeout=240)
    assert interrupted(command, tmp_path / "cut", lambda run: os.kill(children(run.pid)[-1], signal.SIGKILL))
    seldom = [*command[:-1], "--set=checkpoint.rounds=0", "--out"]
    (told,) = interrupted(seldom, tmp_path / "told", lambda run: run.send_signal(signal.SIGTERM))
    after = count_rounds(tmp_path / "told")
    assert told == f"fedhen: stopped after round {after}; resume with: fedhen resume {tmp_path / 'told'}"
    assert [p.name for p in (tmp_path / "told" / "checkpoints").glob("round-*.json")] == [f"round-{after:06}.json"]
    shutil.copytree(tmp_path / "cut", tmp_path / "alone")
    for name in ("cut", "told"):
        subprocess.run(torchrun(2, "-m", "fedhen", "resume", str(tmp_path / name), "--quiet"), check=True, timeout=240)
        assert same_run(tmp_path / "whole", tmp_path / name)
    assert forks.run(["resume", str(tmp_path / "alone"), "--quiet"], tmp_path / "log")[0] == 0
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        for name in ("alone", "whole")
    )
    assert [r["active"] for r in one] == [r["active"] for r in two]
    # Sums in another order: later rounds drift apart.
    assert [r["loss"] for r in one][:12] == pytest.approx([r["loss"] for r in two][:12], rel=1e-3)
