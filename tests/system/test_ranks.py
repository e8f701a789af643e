"""Several processes play one run: real ones, started by torchrun on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedhen.cli import main
from fedhen.engines.sharded import assign_to_ranks
from fedhen.fleet.processes import free_port
from support import ranks_script
from support.kills import wait_for
from support.ranks import SIX_DEVICES, children, fedhen_lines, torchrun

pytestmark = pytest.mark.process

SCRIPT = Path(ranks_script.__file__)


def start(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    """Models in float64: the order of the sums shows in the last digits alone, and the devices' average by a step.

    Of the devices each rank keeps the rows of those that it trained last, and no other has them.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    with pytest.warns(UserWarning, match="a device failed"):
        ranks_script.train(one)
    together = start(torchrun(2, str(SCRIPT), "train", str(two)))
    assert together.returncode == 0, together.stderr
    for local in ranks_script.RUNS:
        for kind, tolerance in (("server", 1e-12), ("devices", 2**-36)):
            for tier in ("simple", "complex"):
                weights, others = (load_file(f / local / "models" / f"{kind}-{tier}.safetensors") for f in (one, two))
                for name in weights:
                    np.testing.assert_allclose(others[name], weights[name], rtol=0, atol=tolerance)
        rounds, others_rounds = (lines(f / local / "rounds.jsonl") for f in (one, two))
        assert [{**r, "loss": 0, "distance": 0} for r in rounds] == [
            {**r, "loss": 0, "distance": 0} for r in others_rounds
        ]
        assert [r["loss"] for r in rounds] == pytest.approx([r["loss"] for r in others_rounds], rel=1e-12)
        kept = [set(json.loads(line.split(" has ")[1])) for line in ours_of(together.stderr, local)]
        assert len(kept) == 2 and not kept[0] & kept[1] and all(kept)
        assert kept[0] | kept[1] == {device for r in rounds for device in r["active"]}
    assert [r["failed"] for r in lines(two / "faults" / "rounds.jsonl")] == [[2, 5]] * 3
    assert (one / "faults" / "errors.jsonl").read_text() == (two / "faults" / "errors.jsonl").read_text()
    assert together.stderr.count("a device failed and is left out, device 2, round 1") == 1
    # a: (1 + 2·3 + 5) / 4 in the first row, (1 + 5) / 2 in the second; c: (2·1 + 4) / 3 and 1; b: its only one.
    expected = {"a": [[3.0, 3.0], [3.0, 3.0]], "b": [0.0, 1.0, 2.0], "c": [2.0, 1.0], "d": [-1.0]}
    assert (one / "average.txt").read_text() == (two / "average.txt").read_text() == repr(expected)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ours_of(text: str, local: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{local}: rank")]


def test_the_command_line_under_torchrun(tmp_path: Path) -> None:
    """One rank gives the bytes of a plain run; two write one folder, show progress once and print one report."""
    run = ["-m", "fedhen", "run", "digits", "--rounds", "2", *SIX_DEVICES, "--quiet", "--out"]
    compare = [
        "-m",
        "fedhen",
        "compare",
        "digits",
        "--methods",
        "fedhen,noside",
        "--rounds",
        "2",
        *SIX_DEVICES,
        "--out",
    ]
    plain, one, two = (tmp_path / name for name in ("plain", "one", "two"))
    assert main([*run[2:], str(plain)]) == 0
    done = start(torchrun(1, *run, str(one)))
    assert done.returncode == 0, done.stderr
    for file in ("rounds.jsonl", "models/server-simple.safetensors", "models/devices-complex.safetensors"):
        assert (plain / file).read_bytes() == (one / file).read_bytes()
    done = start(torchrun(2, *compare, str(two), "--track", "tensorboard"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("round 2/2") == 2 and done.stdout.count("Rounds to target") == 1
    assert lines(two / "fedhen" / "rounds.jsonl")[-1]["accuracy"] == lines(plain / "rounds.jsonl")[-1]["accuracy"]
    assert len(list((two / "fedhen" / "tensorboard").iterdir())) == 1, "only rank 0 logs"
    assert json.loads((two / "fedhen" / "environment.json").read_text())["hardware"]["ranks"] == 2


def test_errors_are_printed_once(tmp_path: Path) -> None:
    """That of all ranks and that of rank 0 by rank 0; one of rank 1 by rank 1, and rank 0 ends too."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    done = start(torchrun(2, str(SCRIPT), "errors", str(tmp_path / "full")))
    assert done.returncode != 0
    for rank in (0, 1):
        assert f"rank {rank}: the ranks have different settings, data or models" in done.stderr
    setting, folder, *rest = fedhen_lines(done.stderr)
    assert setting.startswith("fedhen: unknown setting 'training.nothing'") and "is not empty" in folder
    first, *last = rest
    assert first.startswith("fedhen: rank 1 stopped: cannot keep the devices' models in ")
    assert all(line.startswith("fedhen: rank 0 stopped: ") for line in last)
    assert sorted(p.name for p in (tmp_path / "full").iterdir()) == ["none", "thesis.txt"]


def test_a_rank_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    """SIGKILL to the second rank in mid-run: the other says so in one line, and no process is left."""
    command = torchrun(
        2, "-m", "fedhen", "run", "digits", "--rounds", "500", *SIX_DEVICES, "--out", str(tmp_path / "run")
    )
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        ExitStack() as always,
    ):
        always.callback(process.terminate)
        recorded = tmp_path / "run" / "rounds.jsonl"
        wait_for(lambda: recorded.is_file() and recorded.stat().st_size)
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[-1], signal.SIGKILL)
        _, errors = process.communicate(timeout=240)
    assert process.returncode != 0
    (line,) = fedhen_lines(errors)
    assert "rank" in line and "stopped: " in line
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_rank_that_lost_another_reports_only_that(tmp_path: Path) -> None:
    """Told to end just before it says so, as torchrun may do, it says that and no other word."""
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(SCRIPT), "lost", str(tmp_path)]
    with ExitStack() as both:
        ranks = []
        for rank in "01":
            own = {**os.environ, **address, "RANK": rank}
            ranks.append(both.enter_context(subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True)))
            both.callback(ranks[-1].kill)
        (said,) = fedhen_lines(ranks[0].communicate(timeout=240)[1])
    assert said.startswith("fedhen: another rank cannot be reached") and ranks[0].returncode == 1


def test_devices_are_assigned_to_ranks_by_cost() -> None:
    """7 → rank 0, 5 → rank 1, 4 → rank 1 (5 < 7), 3 → rank 0 (7 < 9), 1 → rank 1 (9 < 10)."""
    assert assign_to_ranks({10: 3, 11: 7, 12: 5, 13: 1, 14: 4}, 2, {}) == [[10, 11], [12, 13, 14]]
    assert assign_to_ranks({1: 2, 2: 2, 3: 2}, 4, {1: 3, 2: 3}) == [[2], [3], [], [1]], (
        "ties to the owner, else the lowest"
    )
    assert assign_to_ranks({}, 2, {}) == [[], []]
