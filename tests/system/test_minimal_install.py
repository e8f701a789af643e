"""Training needs torch, numpy and safetensors alone: runs are played, saved and resumed without any other package."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from support.tiny import TINY_OPTIONS

pytestmark = pytest.mark.process

TESTS = Path(__file__).parents[1]
REFUSED_ANYWAY = {"jinja2", "markupsafe"}
"""torch requires them for its compiler, which runs do without."""
HIDE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
"""
FROM_PYTHON = """
import numpy as np
import fedhen
from support.families import two_exits

rng = np.random.default_rng(0)
data = fedhen.arrays(rng.normal(size=(60, 6)), np.arange(60) % 3, rng.normal(size=(30, 6)), np.arange(30) % 3)
small = {"devices": {"number": 4, "active": 2}, "checkpoint": {"rounds": 1}}
fedhen.train(two_exits(), data, out="run", accelerator="cpu", rounds=2, **small)
assert len(fedhen.resume("run", family=two_exits(), data=data, rounds=4, accelerator="cpu").rounds) == 4
fedhen.load("run", "simple", "devices", family=two_exits())
"""
FROM_THE_COMMAND_LINE = f"""
from fedhen.cli import main

options = {TINY_OPTIONS!r}
assert main(["run", "digits", "--rounds", "2", "--quiet", "--out", "run", "--set=checkpoint.rounds=1", *options]) == 0
assert main(["resume", "run", "--rounds", "4", "--quiet"]) == 0
assert main(["evaluate", "run"]) == 0
"""


def required_by(*names: str) -> set[str]:
    """Returns distributions with all that they require on this machine."""
    found, new = set[str](), {*names}
    while new:
        found |= new
        needed = [Requirement(text) for name in new for text in requires(name) or ()]
        new = {
            each.name.lower() for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})
        } - found
    return found


def hidden_modules() -> set[str]:
    """Returns every installed top-level module that torch, numpy, safetensors and fedhen do without."""
    kept = {name.replace("_", "-") for name in required_by("torch", "numpy", "safetensors")} | {"fedhen"}
    installed = packages_distributions().items()
    others = {module for module, names in installed if not kept & {name.lower().replace("_", "-") for name in names}}
    return others | REFUSED_ANYWAY


@pytest.mark.parametrize("code", [FROM_PYTHON, FROM_THE_COMMAND_LINE], ids=["python", "command line"])
def test_runs_are_played_saved_and_resumed(code: str, tmp_path: Path) -> None:
    hidden = hidden_modules()
    assert {"matplotlib", "rich", "flwr", "PIL", "hypothesis", "pytest"} <= hidden and "torch" not in hidden
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", HIDE.format(hidden=hidden) + code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "round-000004.json").is_file()
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 4
