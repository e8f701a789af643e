"""Commands on runs whose primary metric is not accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedhen
from fedhen.cli import main
from fedhen.cli.training import describe_result
from fedhen.runs.reader import read_run
from support.families import two_exits
from support.tiny import TINY_OPTIONS

LOSS = [*TINY_OPTIONS, '--set=task.metrics=["loss", "accuracy"]', "--accelerator=cpu"]


@pytest.mark.slow
def test_a_run_by_its_loss_is_shown_evaluated_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["run", "digits", "--rounds=2", f"--out={out}", *LOSS]) == 0
    shown = capsys.readouterr()
    run = read_run(tmp_path / "run")
    final = run.rounds[-1].metrics["loss"]["devices"]["simple"]
    assert run.metric.name == "loss" and final is not None
    assert f"simple {final:.4g}  complex " in shown.err.splitlines()[-1]
    assert shown.out.splitlines()[0] == f"simple     loss {final:.4g} on the test set (all-devices average)"

    assert main(["evaluate", out, "--accelerator=cpu"]) == 0
    header, first, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["models", "tier", "round", "loss", "recorded"]
    assert first.split() == ["devices", "simple", "2", f"{final:.4g}", f"{final:.4g}"]

    assert main(["report", out, "--target=simple=auto", f"--out={tmp_path / 'report'}"]) == 0
    text = capsys.readouterr().out
    assert "Loss, size and effort" in text and "all devices, accuracy, final, %" in text


def numbers(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 6, generator=made)
    return x, x[:, :3] * 2


@pytest.mark.slow
def test_a_regression_from_python_is_reported(tmp_path: Path) -> None:
    data = fedhen.arrays(*numbers(0), *numbers(1))
    trained = fedhen.train(
        two_exits(),
        data,
        task="regression",
        out=tmp_path / "run",
        accelerator="cpu",
        rounds=3,
        devices={"number": 4, "active": 2},
        training={"epochs": 1},
    )
    final = trained.metrics["rmse"]["devices"]["simple"]
    text = fedhen.report(tmp_path / "run", out=tmp_path / "report")
    assert "Rounds to target (all-devices average)" in text and "RMSE, size and effort" in text
    assert f"RMSE {final:.4g} on the test set (all-devices average)" in describe_result(tmp_path / "run")
