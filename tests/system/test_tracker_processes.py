"""Trackio in an environment of its own, and event files of a run that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

import fedhen
from fedhen.cli import main
from support.tiny import TINY_OPTIONS
from support.trackers import read_tensorboard

SOURCE = str(Path(fedhen.__file__).parents[1])
TRACKIO = "trackio==0.43.0"
"""It needs another version of pillow than the one in constraints.txt."""
READ = """
import json, sys
from trackio import Api
from trackio.sqlite_storage import SQLiteStorage

(run,) = Api().runs("fedhen")
logs = SQLiteStorage.get_logs("fedhen", run.name, run_id=run.id)
models = [artifact["name"] for artifact in SQLiteStorage.list_artifacts("fedhen")]
print(json.dumps({"config": run.config, "logs": logs, "models": models}))
"""


@pytest.mark.slow
@pytest.mark.process
def test_trackio_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Without torch: a run is logged afterwards, in two parts."""
    python = str(tmp_path / "venv" / "bin" / "python")
    venv.create(tmp_path / "venv")
    # uv comes with Flower, and is several times faster than pip.
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python, TRACKIO]
    made = subprocess.run(install, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"{TRACKIO} cannot be installed here: {made.stderr.strip().splitlines()[-1]}")
    run, env = tmp_path / "run", {**os.environ, "PYTHONPATH": SOURCE, "TRACKIO_DIR": str(tmp_path / "trackio")}
    options = ["--accelerator", "cpu", "--quiet", *TINY_OPTIONS]
    assert main(["run", "digits", "--rounds", "2", "--out", str(run), *options]) == 0
    for rounds in (2, 3):
        if rounds == 3:
            assert main(["resume", str(run), "--rounds", "3", "--quiet"]) == 0
        log = [python, "-m", "fedhen", "log", str(run), "--to", "trackio"]
        done = subprocess.run(log, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{run}: {rounds} rounds logged to trackio (project fedhen, run run-")
    read = subprocess.run([python, "-c", READ], env=env, capture_output=True, text=True, check=True)
    found = json.loads(read.stdout.splitlines()[-1])
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in found["logs"]] == [1, 2, 3]
    assert [entry["accuracy/server/simple"] for entry in found["logs"]] == [
        record["accuracy"]["server"]["simple"] for record in records
    ]
    assert found["config"]["training.epochs"] == 1 and found["config"]["tags"]["method"] == "fedhen"
    assert {name.rpartition("-")[2] for name in found["models"]} == {"simple", "complex"}
    assert len([name for name in found["models"] if "best-" not in name]) == 4


@pytest.mark.slow
@pytest.mark.process
def test_a_kill_loses_no_round_in_tensorboard(tmp_path: Path) -> None:
    """Every round that tracking.json counts is in the event file, at whatever moment the process is killed."""
    run = tmp_path / "run"
    code = "import sys; from fedhen.cli import main; main(sys.argv[1:])"
    arguments = ["run", "digits", "--rounds", "500", "--accelerator", "cpu", "--quiet", "--out", str(run)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--track", "tensorboard", *TINY_OPTIONS],
        env={**os.environ, "PYTHONPATH": SOURCE},
    )
    try:
        while process.poll() is None and not _logged(run) >= 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    curves, _ = read_tensorboard(run / "tensorboard")
    steps, logged = [step for step, _ in curves["seconds/round"]], _logged(run)
    assert 3 <= logged < 500 and steps[:logged] == [*range(1, logged + 1)] and len(steps) <= logged + 1


def _logged(run: Path) -> int:
    file = run / "tracking.json"
    return int(json.loads(file.read_text())["tensorboard"]["round"]) if file.is_file() else 0
