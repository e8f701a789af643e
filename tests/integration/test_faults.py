"""Devices that fail cost no other device anything, are counted and told, and end a run that is in vain."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedhen
from fedhen.algorithm.failures import MAX_ERROR_LENGTH
from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Failure
from fedhen.cli import main
from fedhen.config.validation import from_mapping
from fedhen.errors import FedhenError
from fedhen.experiment.build import build_experiment
from fedhen.experiment.experiment import Experiment
from fedhen.hardware.memory import OUT_OF_MEMORY
from fedhen.runs.reader import read_run
from support.families import came_back, texts, two_exits, words
from support.tiny import TINY_OPTIONS

UNKNOWN = "IndexError: index out of range in self"


def settings(**changes: Any) -> dict[str, Any]:
    small = {"devices": {"number": 8, "active": 8}, "training": {"epochs": 1, "batch_size": 5}}
    return {"rounds": 4, **small, "runtime": {"engine": "plain"}, "evaluation": {"every": 2}, **changes}


def experiment(unknown: list[int], **changes: Any) -> Experiment:
    config = from_mapping(settings(model={"family": "python"}, **changes))
    return build_experiment(config, data=texts(unknown), family=words(), accelerator="cpu")


@pytest.mark.parametrize("engine", ["plain", "fast"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"local": {"name": "scaffold"}},
        {"training": {"epochs": 1, "batch_size": 5, "optimizer": "adam", "optimizer_state": "device"}},
    ],
    ids=["plain", "scaffold", "adam"],
)
def test_a_device_that_raises_costs_no_other(engine: str, changes: dict[str, Any]) -> None:
    """The others come back as without it, to the last bit."""
    runs = [experiment(u, runtime={"engine": engine}, **changes) for u in ([5], [])]
    sents = [Sent(run.server, run.memories.mean) for run in runs]
    replies = list(runs[0].engine.devices.train(1, sents[0], range(8)))
    assert [r for r in replies if isinstance(r, Failure)] == [Failure(5, UNKNOWN)]
    trained = {u.device: u for u in came_back(r for r in replies if not isinstance(r, Failure))}
    without = {u.device: u for u in came_back(runs[1].engine.devices.train(1, sents[1], [0, 1, 2, 3, 4, 6, 7]))}
    assert trained.keys() == without.keys()
    for device, update in trained.items():
        for name, tensor in update.weights.items():
            assert torch.equal(tensor, without[device].weights[name])
    assert set(runs[0].memory) == (set(trained) if changes else set())


@pytest.mark.slow
def test_failures_are_recorded_counted_and_reported_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="a device failed") as told:
        fedhen.train(words(), texts([2, 5]), out=tmp_path / "run", accelerator="cpu", **settings())
    assert len(told) == 1 and f"device 2, round 1: {UNKNOWN}" in str(told[0].message)
    run = read_run(tmp_path / "run")
    assert [(r.failed, r.dropped) for r in run.rounds] == [([2, 5], [])] * 4
    lines = [json.loads(line) for line in (tmp_path / "run" / "errors.jsonl").read_text().splitlines()]
    assert lines == [{"round": n, "device": d, "error": UNKNOWN} for n in (1, 2, 3, 4) for d in (2, 5)]
    assert run.summary is not None and run.summary.failed == 8 and run.summary.dropped == 0
    # Six of eight devices send their models back, three of each tier.
    assert {way: set(n.values()) for way, n in run.rounds[0].bytes.items()} == {
        "down": {4 * (40 + 15) * 4, 4 * (40 + 30) * 4},
        "up": {3 * (40 + 15) * 4, 3 * (40 + 30) * 4},
    }
    shown = fedhen.report(tmp_path / "run", out=tmp_path / "report")
    assert "devices failed" in shown


@pytest.mark.slow
def test_a_run_without_faults_has_no_trace_of_them(tmp_path: Path) -> None:
    fedhen.train(words(), texts(), out=tmp_path / "run", accelerator="cpu", **settings())
    assert not (tmp_path / "run" / "errors.jsonl").exists()
    assert not any(r.failed for r in read_run(tmp_path / "run").rounds)
    assert "devices failed" not in fedhen.report(tmp_path / "run", out=tmp_path / "report")


@pytest.mark.slow
def test_at_most_a_hundred_errors_are_kept(tmp_path: Path) -> None:
    """Seven of eight devices fail in each of 20 rounds."""
    with pytest.warns(UserWarning):
        run = fedhen.train(words(), texts(range(7)), out=tmp_path / "r", accelerator="cpu", **settings(rounds=20))
    lines = (tmp_path / "r" / "errors.jsonl").read_text().splitlines()
    assert len(lines) == 100 and json.loads(lines[-1])["round"] == 15
    assert sum(len(r["failed"]) for r in run.rounds) == 140


def stopped(folder: Path, data: fedhen.Data, family: fedhen.Family, **changes: Any) -> str:
    with warnings.catch_warnings(), pytest.raises(FedhenError) as error:
        warnings.simplefilter("ignore")
        fedhen.train(family, data, out=folder, accelerator="cpu", **settings(rounds=10, **changes))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "fast"])
def test_a_run_from_which_no_device_comes_back_stops_after_three_rounds(tmp_path: Path, engine: str) -> None:
    said = stopped(tmp_path, texts(range(8)), words(), runtime={"engine": engine})
    assert said == f"no device came back from rounds 1 to 3: device 0, round 1: {UNKNOWN}"
    run = read_run(tmp_path)
    assert len(run.rounds) == 3 and run.summary is None and run.damage == ()
    assert "Unfinished" in fedhen.report(tmp_path, out=tmp_path / "report")


def numbers() -> fedhen.Data:
    x, y = torch.full((80, 6), 0.5, dtype=torch.float64), torch.arange(80) % 3
    return fedhen.arrays(x, y, x[:20], y[:20], classes=3)


def test_a_run_whose_weights_are_never_finite_stops_and_names_the_settings_to_lower(tmp_path: Path) -> None:
    far = {"epochs": 4, "batch_size": 5, "lr": 1e308}
    said = stopped(tmp_path, numbers(), two_exits(), training=far)
    assert said.startswith("no device came back from rounds 1 to 3: ")
    assert "not finite, lower training.lr or training.clip" in said
    assert [r.dropped for r in read_run(tmp_path).rounds] == [list(range(8))] * 3


def test_one_device_that_comes_back_keeps_the_run_going() -> None:
    """Rounds 1, 2, 4 and 5 are in vain, round 3 is not, and a round without devices is neither."""
    good = {3: [0], 6: []}
    with pytest.warns(UserWarning):
        run = fedhen.train(
            words(),
            texts(range(1, 8)),
            activate=lambda number, losses: good.get(number, [1, 2]),
            accelerator="cpu",
            **settings(rounds=6),
        )
    assert [bool(r.get("failed")) for r in run.rounds] == [True, True, False, True, True, False]


class Raises(nn.Module):
    """Raises that, in training alone."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.layer = error, nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> list[Tensor]:
        # Two examples are what a family is checked with.
        if self.training and len(x) > 2:
            raise self.error
        return [self.layer(x)]


@pytest.mark.parametrize("engine", ["plain", "fast"])
@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (KeyboardInterrupt(), (KeyboardInterrupt, "^$")),
        (SystemExit(3), (SystemExit, "3")),
        (FedhenError("mine"), (FedhenError, "^mine$")),
        (MemoryError(), (FedhenError, f"^{OUT_OF_MEMORY}$")),
        (torch.OutOfMemoryError("CUDA out of memory"), (FedhenError, "lower training.batch_size, devices.active")),
        (RuntimeError("CUDA error: out of memory"), (FedhenError, f"^{OUT_OF_MEMORY}$")),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling ..."), (FedhenError, f"^{OUT_OF_MEMORY}$")),
    ],
)
def test_errors_that_no_device_caused_end_the_run(
    engine: str, raised: BaseException, expected: tuple[type[BaseException], str]
) -> None:
    family = fedhen.Family({"only": lambda: Raises(raised)})
    with warnings.catch_warnings(), pytest.raises(expected[0], match=expected[1]):
        warnings.simplefilter("ignore")
        fedhen.train(family, numbers(), "fedavg", accelerator="cpu", **settings(runtime={"engine": engine}))


def test_an_error_of_many_lines_is_kept_as_a_short_one(tmp_path: Path) -> None:
    family = fedhen.Family({"only": lambda: Raises(RuntimeError("one\ntwo\x1b[31m" + 1000 * "x"))})
    said = stopped(tmp_path, numbers(), family, method="fedavg")
    assert "RuntimeError: one two?[31mxxx" in said and len(said) < MAX_ERROR_LENGTH + 100


METHOD = """
from fedhen import Method
from fedhen.algorithm.merging import share_common_weights

def fussy(logits, labels):
    if len(labels) > 2:
        raise ValueError("labels\\nmake me nervous")
    return sum(x.mean() for x in logits)

MINE = Method("mine", fussy, share_common_weights)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default::UserWarning")  # the command prints it
def test_the_command_line_stops_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(METHOD)
    code = main(["run", "digits", "--method", "./mine.py:MINE", *TINY_OPTIONS, "--quiet", "--out", "run"])
    told, last = capsys.readouterr().err.splitlines()
    assert code == 2 and "ValueError: labels make me nervous" in told
    assert last.startswith("fedhen: no device came back from rounds 1 to 3: device ")
    assert len(read_run(Path("run")).rounds) == 3
    assert main(["report", "run"]) == 0
