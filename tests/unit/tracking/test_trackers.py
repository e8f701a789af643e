"""Names of trackers, the values that they are given, and what a run folder says about them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import fedhen
from fedhen.errors import ConfigError
from fedhen.tracking.observers import Observer, describe
from fedhen.tracking.tracker import Logged, read_logged
from fedhen.tracking.trackers import TRACKERS, check_track, make_observers
from fedhen.tracking.values import RoundValues
from support.cli import refused
from support.families import two_exits
from support.trackers import SMALL, data


def test_values_of_two_rounds() -> None:
    values = RoundValues()
    first = {
        "round": 1,
        "loss": None,
        "bytes": {"down": {"simple": 10, "complex": 30}, "up": {"simple": 5, "complex": 0}},
    }
    assert values.add(first, {}) == {
        "bytes/down/simple": 10,
        "bytes/down/complex": 30,
        "bytes/up/simple": 5,
        "bytes/up/complex": 0,
    }
    second: dict[str, Any] = {
        "round": 2,
        "loss": 0.5,
        "bytes": {"down": {"simple": 1, "complex": 2}, "up": {"simple": 3, "complex": 4}},
        "accuracy": {"server": {"simple": 0.75}},
        "metrics": {"rmse": {"devices": {"simple": 2.0, "complex": None}}},
        "own": {"personal": {"simple": [0.5, None, 1.0], "complex": [None]}},
        "held_out": {"server": {"simple": [0.25]}},
        "epsilon": 1.5,
        "distance": {"simple": 0.25},
    }
    assert values.add(second, {"train": 1.0, "total": 3.0}) == {
        "loss/training": 0.5,
        "bytes/down/simple": 11,
        "bytes/down/complex": 32,
        "bytes/up/simple": 8,
        "bytes/up/complex": 4,
        "accuracy/server/simple": 0.75,
        "rmse/devices/simple": 2.0,
        "own/personal/simple": 0.75,
        "held_out/server/simple": 0.25,
        "privacy/epsilon": 1.5,
        "distance/simple": 0.25,
        "seconds/round": 3.0,
    }


def test_names_are_split_and_named_once() -> None:
    own = Observer()
    assert check_track("tensorboard, mlflow") == ["tensorboard", "mlflow"]
    assert check_track(["mlflow,tensorboard", own, "mlflow"]) == ["mlflow", "tensorboard", own]
    assert check_track([]) == []


def test_a_tracker_that_is_unknown_or_missing_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder wandb/ in the working directory, as wandb makes it, is not the package."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    assert refused(capsys, "run", "digits", "--out", str(out), "--track", "tensorboad") == (
        "fedhen: unknown tracker 'tensorboad': did you mean 'tensorboard'? "
        "choose from tensorboard, mlflow, wandb, trackio\n"
    )
    for name, kind in TRACKERS.items():
        for package in {package for packages in kind.packages for package in packages} - {"torch"}:
            monkeypatch.setitem(sys.modules, package, None)
        assert refused(capsys, "run", "digits", "--out", str(out), "--track", name) == (
            f"fedhen: --track {name} needs: pip install 'fedhen[{name}]'\n"
        )
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()
    with pytest.raises(ConfigError, match=r"track wandb needs: pip install 'fedhen\[wandb\]'"):
        check_track("wandb")
    assert not out.exists()


def test_trackers_need_a_run_folder() -> None:
    with pytest.raises(ConfigError, match="track='tensorboard' needs a run folder"):
        fedhen.train(two_exits(), data(), track="tensorboard", rounds=1, **SMALL)
    make_observers([Observer()], has_folder=False)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"mlflow": 1}',
        '{"mlflow": {"run": "../../etc", "round": 1}}',
        '{"mlflow": {"run": "x", "round": -1}}',
        '{"mlflow": {"run": "x", "finished": 3}}',
        '{"mlflow": {"round": 3}}',
    ],
)
def test_a_damaged_file_of_trackers_is_ignored_with_a_warning(text: str, tmp_path: Path) -> None:
    (tmp_path / "tracking.json").write_text(text)
    with pytest.warns(UserWarning, match="tracking.json is damaged"):
        assert read_logged(tmp_path) == {}


def test_what_is_logged_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "tracking.json").write_text(json.dumps({"mlflow": {"run": "a.b-1_", "round": 3, "more": 1}}))
    assert read_logged(tmp_path) == {"mlflow": Logged("a.b-1_", 3)}


def test_errors_are_one_line_without_secrets() -> None:
    error = ConnectionError("no answer from https://me:hunter2@host:5000/api?write_token=s3cret&x=1\nmaybe it is away")
    assert describe(error) == (
        "ConnectionError: no answer from https://host:5000/api?write_token=...&x=1 maybe it is away"
    )


def test_log_refuses_what_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a run folder" in refused(capsys, "log", str(tmp_path), "--to", "tensorboard")
    assert "--to: choose from tensorboard, mlflow" in refused(capsys, "log", str(tmp_path), "--to", ",")
