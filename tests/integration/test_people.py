"""What people try first with models and data of their own, in the form in which they expect it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import fedhen
from fedhen.cli import main
from fedhen.config import toml
from fedhen.config.validation import flatten_config
from fedhen.errors import FedhenError
from fedhen.experiment.build import build_experiment
from fedhen.runs.reader import read_run
from support.cli import refused
from support.families import TwoExits, two_exits
from support.forging import forge_checkpoint

DEVICES = 6
SMALL: dict[str, Any] = {
    "rounds": 2,
    "accelerator": "cpu",
    "training": {"epochs": 1, "batch_size": 8},
    "runtime": {"workers": 1},
}
QUIET = [
    "--rounds",
    "2",
    "--quiet",
    "--accelerator",
    "cpu",
    "--set=evaluation.every=1",
    "--set=training.epochs=1",
    "--set=runtime.workers=1",
]
MY = """
from pathlib import Path
import torch
from torch import nn
import fedhen
from fedhen.tasks import Regression, Task
from fedhen.tasks.metrics import make_mean_metric

with (Path(__file__).parent / "executed").open("a") as file:
    file.write("once\\n")


class Net(nn.Module):
    def __init__(self, deep):
        super().__init__()
        self.body, self.exit = nn.Linear(2, 4), nn.Linear(4, 3)
        self.top = nn.Linear(4, 3) if deep else None

    def forward(self, x):
        h = self.body(x).relu()
        return [self.exit(h)] if self.top is None else [self.exit(h), self.top(h)]


def family():
    return fedhen.Family({"simple": lambda: Net(False), "complex": lambda: Net(True)})


FAMILY = family()
OTHER = fedhen.Family({"low": lambda: Net(False), "high": lambda: Net(True)})
x, y = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
DATA = fedhen.per_device([(x[k::6], y[k::6]) for k in range(6)], x[:9], y[:9])


class Weighted(Task):
    name = "weighted"
    metrics = (make_mean_metric("right", lambda output, y: output.argmax(1) == y, unit="%"),)

    def loss(self, output, targets):
        return nn.functional.cross_entropy(output, targets, torch.tensor([1.0, 2.0, 3.0]))

    def count_outputs(self, targets, classes):
        return classes


TASK = Weighted()
MINE = fedhen.Method("mine", fedhen.FEDHEN.objective, fedhen.FEDHEN.pools)
NUMBER = 3


def broken():
    raise RuntimeError("out of order")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file of one's own, and a table of six people."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(MY)
    people().to_csv("people.csv", index=False)
    return tmp_path


def people() -> pandas.DataFrame:
    rng = np.random.default_rng(0)
    number = 10 * DEVICES
    return pandas.DataFrame(
        {
            "user": [f"user {k % DEVICES}" for k in range(number)],
            "age": rng.normal(size=number),
            "weight": rng.normal(size=number),
            "ill": rng.choice(["no", "yes", "maybe"], number),
        }
    )


def settings_of(run: Path) -> dict[str, Any]:
    return flatten_config(read_run(run).config)


def small_family() -> fedhen.Family:
    return fedhen.Family({"simple": lambda: TwoExits(2, 3, False), "complex": lambda: TwoExits(2, 3, True)})


# A column that names the device


@pytest.mark.parametrize("form", ["frame", "csv"])
def test_a_table_with_a_column_that_names_the_device(here: Path, form: str) -> None:
    data = fedhen.from_table(people() if form == "frame" else "people.csv", target="ill", by="user")
    assert len(data.shards) == DEVICES and data.classes == 3 and len(data.y_test) == DEVICES
    trained = fedhen.train(small_family(), data, out="run", devices={"active": 2}, **SMALL)
    assert trained.experiment.config.devices.number == DEVICES
    assert set(trained.accuracy["server"]) == {"simple", "complex"}
    assert settings_of(here / "run")["split.kind"] == "natural"


@pytest.mark.slow
def test_a_report_names_the_split_for_what_it_is(here: Path) -> None:
    data = fedhen.from_table("people.csv", target="ill", by="user")
    fedhen.train(small_family(), data, out="run", **SMALL)
    fedhen.report("run", out="report")
    shown = re.sub(r"<[^>]+>", " ", Path("report/report.html").read_text())
    assert re.search(r"Split\s+natural", shown)


def test_a_table_on_the_command_line(here: Path) -> None:
    """The devices are the people: their number follows from the table."""
    table = ["--data", "people.csv", "--set", "data.by=user", "--set", "data.target=ill"]
    assert main(["run", "--family", "my.py:FAMILY", *table, *QUIET, "--out", "run"]) == 0
    found = settings_of(here / "run")
    assert (found["devices.number"], found["devices.active"], found["split.kind"]) == (DEVICES, DEVICES, "natural")
    assert found["data.name"] == str(here / "people.csv") and found["recipe"] == "custom-on-people"
    assert main(["evaluate", "run", "--family", "my.py:FAMILY"]) == 0
    for more, says in (
        (
            ["--set", "devices.number=5", "--set", "devices.active=5"],
            "devices.number=5, but data is given for 6 devices",
        ),
        (["--set", "data.by=id"], "unknown column in by 'id'"),
        (["--set", "data.target=age", "--set", "data.by="], "column 'user' is text"),
    ):
        with pytest.raises(FedhenError, match=says):
            raise FedhenError(error_of(["run", "--family", "my.py:FAMILY", *table, *more, *QUIET]))


def error_of(arguments: list[str]) -> str:
    from fedhen.cli.main import parser

    options = parser().parse_args(arguments)
    with pytest.raises(FedhenError) as error:
        options.run(options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
def test_arrays_with_a_device_array(here: Path) -> None:
    x, y = np.random.default_rng(0).random((40, 8, 8), np.float32), np.arange(40) % 4
    np.savez("own.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8], device=np.repeat([3, 1, 2, 7], 10))
    tiny = ["--set=model.widths=[4, 4, 8, 8]", "--set=training.batch_size=5"]
    assert main(["run", "digits", "--data", "own.npz", *tiny, *QUIET, "--out", "run"]) == 0
    found = settings_of(here / "run")
    assert (found["devices.number"], found["split.kind"]) == (4, "natural")
    assert main(["data", "partition", "digits", "--data", "own.npz", "--out", "split"]) == 0
    counts = json.loads(Path("split/partition.json").read_text())["counts"]
    owners = np.repeat([3, 1, 2, 7], 10)
    assert counts == [np.bincount(y[owners == device], minlength=4).tolist() for device in (1, 2, 3, 7)]


def test_a_split_that_the_data_does_not_bring_is_refused(here: Path) -> None:
    x, y = torch.randn(20, 2), torch.arange(20) % 3
    with pytest.raises(FedhenError, match=r"split\.kind=natural needs data that comes split"):
        fedhen.train(small_family(), fedhen.arrays(x, y), devices={"number": 2, "active": 1}, split={"kind": "natural"})


def test_a_run_from_before_natural_splits_is_resumed(here: Path) -> None:
    """Its configuration says iid, which was never used."""
    data = fedhen.from_table("people.csv", target="ill", by="user")
    fedhen.train(small_family(), data, out="run", **SMALL)
    text = Path("run/config.toml").read_text()
    Path("run/config.toml").write_text(text.replace('kind = "natural"', 'kind = "iid"'))
    resumed = fedhen.resume("run", family=small_family(), data=data, rounds=3, accelerator="cpu")
    assert len(resumed.rounds) == 3


# One tier for each device


TIERS = ["complex", "simple", "complex", "complex", "simple", "complex"]


def test_tiers_one_a_device(here: Path) -> None:
    data = fedhen.from_table("people.csv", target="ill", by="user")
    trained = fedhen.train(small_family(), data, tiers=TIERS, out="run", **SMALL)
    assert list(trained.experiment.population.tier_of) == TIERS
    resumed = fedhen.resume("run", family=small_family(), data=data, rounds=3, accelerator="cpu")
    assert list(resumed.experiment.population.tier_of) == TIERS
    with pytest.raises(FedhenError, match=r"tiers lists 2 devices, and devices\.number=6"):
        fedhen.train(small_family(), data, tiers=["simple", "complex"], **SMALL)
    with pytest.raises(FedhenError, match="unknown tier in tiers 'small': choose from simple, complex"):
        fedhen.train(small_family(), data, tiers=["small"] * 6, **SMALL)


def test_tiers_as_counts(here: Path) -> None:
    data = fedhen.from_table("people.csv", target="ill", by="user")
    trained = fedhen.train(small_family(), data, tiers={"simple": 1, "complex": 5}, **SMALL)
    assert list(trained.experiment.population.tier_of) == ["simple"] + ["complex"] * 5
    with pytest.raises(FedhenError, match=r"tiers counts 7 devices, and devices\.number=6"):
        fedhen.train(small_family(), data, tiers={"simple": 2, "complex": 5}, **SMALL)


@pytest.mark.slow
def test_the_order_of_tiers_changes_which_device_trains_what(here: Path) -> None:
    """A fleet whose devices and tiers are permuted alike trains on the same pairs, so it ends at the same model.

    All devices are active, each takes one step with all of its data, and sums are exact enough to compare.
    """
    data = fedhen.from_table("people.csv", target="ill", by="user", test_share=0)
    order = sorted(range(DEVICES), key=lambda device: TIERS[device] == "complex")
    moved = data.split([data.shards[device] for device in order])
    whole = {**SMALL, "training": {"epochs": 1, "batch_size": 50}, "devices": {"active": DEVICES}}
    mixed = fedhen.train(small_family(), data, tiers=TIERS, **whole)
    sorted_tiers = fedhen.train(small_family(), moved, tiers={"simple": 2, "complex": 4}, **whole)
    other = fedhen.train(small_family(), data, tiers={"simple": 2, "complex": 4}, **whole)
    for tier in ("simple", "complex"):
        one, same, different = (run.model(tier).state_dict() for run in (mixed, sorted_tiers, other))
        assert all(torch.allclose(one[name], same[name]) for name in one)
        assert not all(torch.allclose(one[name], different[name]) for name in one)


# torch's Datasets


def test_a_dataset_for_each_device() -> None:
    from torch.utils.data import TensorDataset

    devices = [TensorDataset(torch.randn(8, 2), torch.arange(8) % 3) for _ in range(4)]
    trained = fedhen.train(small_family(), fedhen.from_datasets(devices, devices[0]), devices={"active": 2}, **SMALL)
    assert trained.experiment.config.devices.number == 4 and set(trained.accuracy["server"]) == {"simple", "complex"}


# Modules in place of functions


def test_a_family_of_modules_says_to_wrap_them() -> None:
    with pytest.raises(FedhenError, match="tier 'simple': pass a function that builds the module, like lambda: model"):
        fedhen.Family({"simple": TwoExits(2, 3, False)})


# No test data


def test_no_test_data_at_all(here: Path) -> None:
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    given = {**SMALL, "devices": {"number": 4, "active": 2}}
    trained = fedhen.train(two_exits(), fedhen.arrays(x, y), out="run", **given)
    assert trained.metrics == {} and all("accuracy" not in record for record in trained.rounds)
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["rounds"] == 2 and "final" not in summary and "best" not in summary
    assert isinstance(fedhen.load("run", "simple", family=two_exits()), torch.nn.Module)
    resumed = fedhen.resume("run", family=two_exits(), data=fedhen.arrays(x, y), rounds=4, accelerator="cpu")
    assert len(resumed.rounds) == 4
    straight = fedhen.train(two_exits(), fedhen.arrays(x, y), **{**given, "rounds": 4})
    assert all(
        torch.equal(tensor, straight.model("complex").state_dict()[name])
        for name, tensor in resumed.model("complex").state_dict().items()
    )


def test_a_table_without_test_rows_is_trained_and_resumed(here: Path) -> None:
    """Its test targets are an empty array of numpy, unlike an empty slice of a tensor."""
    numbers = {name: column for name, column in people().items() if name != "ill"} | {"height": np.arange(60.0)}
    for table, target, task, outputs in (
        ("people.csv", "ill", "classification", 3),
        (numbers, "height", "regression", 1),
    ):
        data, family = fedhen.from_table(table, target, by="user", test_share=0), two_exits(2, outputs)
        fedhen.train(family, data, out=task, task=task, **SMALL)
        assert len(fedhen.resume(task, family=family, data=data, rounds=3, accelerator="cpu").rounds) == 3


# One's own model, data and task from the command line


OWN = ["--family", "./my.py:FAMILY", "--data", "./my.py:DATA", "--task", "./my.py:TASK"]


def executed(here: Path) -> int:
    """How often my.py was executed since the last call."""
    path = here / "executed"
    number = path.read_text().count("once") if path.exists() else 0
    path.unlink(missing_ok=True)
    return number


def test_own_family_data_and_task_train_are_resumed_and_scored(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *OWN, "--method", "./my.py:MINE", *QUIET, "--out", "run"]) == 0
    assert executed(here) == 1, "one file, of which four names are used"
    found, file = settings_of(here / "run"), here / "my.py"
    assert [found[key] for key in ("model.family", "data.name", "task.name", "method_file")] == [
        f"{file}:FAMILY",
        f"{file}:DATA",
        f"{file}:TASK",
        f"{file}:MINE",
    ]
    assert found["devices.number"] == 6 and found["recipe"] == "custom-on-my"
    assert (
        main(["resume", "run", *OWN, "--method", "my.py:MINE", "--rounds", "4", "--quiet", "--accelerator", "cpu"]) == 0
    )
    assert executed(here) == 1
    assert main(["run", *OWN, "--method", "my.py:MINE", *QUIET, "--rounds", "4", "--out", "straight"]) == 0
    assert executed(here) == 1
    for name in ("rounds.jsonl", "models/server-complex.safetensors"):
        assert Path("run", name).read_bytes() == Path("straight", name).read_bytes()
    capsys.readouterr()
    assert main(["evaluate", "run", *OWN]) == 0
    assert executed(here) == 1 and "differs" not in capsys.readouterr().out


def test_data_that_comes_split_has_a_centralised_reference(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One device holds all 60 examples, or half of them, also when the run is resumed."""
    command = ["centralised", *OWN[:4], "--tier", "simple", *QUIET]
    assert main([*command, "--out", "all"]) == main([*command, "--fraction", "0.5", "--out", "half"]) == 0
    assert settings_of(here / "all")["devices.number"] == 1
    for folder, number in (("all", 60), ("half", 30)):
        assert main(["resume", folder, *OWN[:4], "--rounds", "2", "--quiet", "--accelerator", "cpu"]) == 0
        config, x = toml.read_toml(Path(folder, "config.toml")), torch.zeros(10, 2)
        data = fedhen.per_device([(x, torch.arange(10) % 3)] * DEVICES)
        found = build_experiment(config, data=data, family=small_family(), accelerator="cpu")
        assert [len(shard) for shard in found.population.data.shards] == [number]


def test_a_run_is_not_resumed_with_a_changed_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume = ["resume", "run", *OWN, "--rounds", "3", "--quiet", "--accelerator", "cpu"]
    assert main(["run", *OWN, *QUIET, "--out", "run"]) == 0
    capsys.readouterr()
    file = here / "my.py"
    file.write_text(file.read_text() + "\n")
    said = refused(capsys, *resume)
    assert "this has changed since its checkpoint: family's file, data's file, task's file; use the same" in said

    def forget(about: dict[str, Any], entries: object) -> None:
        for name in ("family's file", "data's file", "task's file"):
            del about["digests"][name]

    forge_checkpoint(here / "run", 2, forget)
    assert main(resume) == 0, "checkpoints from before these were compared"


def test_what_only_a_run_folder_names_is_never_executed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *OWN, "--method", "./my.py:MINE", *QUIET, "--out", "run"]) == 0
    executed(here)
    capsys.readouterr()
    file = here / "my.py"
    left = {"family": "FAMILY", "data": "DATA", "task": "TASK", "method": "MINE"}
    for part, name in left.items():
        flags = [f"--{p}={file}:{n}" for p, n in left.items() if p != part]
        said = f"this run's {part} was {file}:{name}: pass it again with --{part} {file}:{name}"
        assert said in refused(capsys, "resume", "run", *flags, "--rounds", "3", "--accelerator", "cpu")
        if part != "method":
            flags = [flag for flag in flags if not flag.startswith("--method")]
            assert said in refused(capsys, "evaluate", "run", *flags)
    executed(here)
    for command in (["resume", "run", "--rounds", "3"], ["evaluate", "run"], ["run", "--config", "run/config.toml"]):
        without_method = Path("run/config.toml").read_text().replace(f'method_file = "{file}:MINE"', 'method_file = ""')
        Path("run/config.toml").write_text(without_method.replace('method = "mine"', 'method = "fedhen"'))
        assert "this run's " in refused(capsys, *command)
        with pytest.raises(FedhenError, match="this run's family was"):
            fedhen.load("run", "simple")
    assert executed(here) == 0, "nothing that was not passed"


def test_the_setting_of_the_family_may_be_a_file(here: Path) -> None:
    """`--set` is the user's own word, unlike a run folder's."""
    chosen = ["--set", "model.family=./my.py:family", "--set", "data.by=user", "--set", "data.target=ill"]
    assert main(["run", "--data", "people.csv", *chosen, *QUIET, "--out", "run"]) == 0
    assert settings_of(here / "run")["model.family"] == f"{here / 'my.py'}:family" and executed(here) == 1


@pytest.mark.slow
def test_compare_trains_own_models_with_each_method(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *OWN[:4], "--methods", "fedhen,my.py:MINE", *QUIET, "--out", "both"]) == 0
    assert executed(here) == 1 and Path("both/report.html").is_file()
    assert settings_of(here / "both/mine")["recipe"] == "custom-on-my"


def test_a_file_and_a_recipe_may_be_combined_with_own_parts(here: Path) -> None:
    Path("my.toml").write_text("rounds = 3\ntiers = ['high', 'low', 'low', 'low', 'low', 'low']\n")
    own = ["--family", "my.py:OTHER", "--data", "my.py:DATA"]
    assert main(["run", "--config", "my.toml", *own, *QUIET[2:], "--out", "run"]) == 0
    found = settings_of(here / "run")
    assert found["tiers"] == {"low": pytest.approx(5 / 6), "high": pytest.approx(1 / 6)} and found["rounds"] == 3
    assert found["devices.tiers"][0] == "high"
    assert main(["run", "digits", *own, *QUIET, "--out", "other"]) == 0
    assert settings_of(here / "other")["tiers"] == {"low": 0.5, "high": 0.5}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--family", "no.py:FAMILY", "--data", "my.py:DATA"],
            "no.py does not exist: name your family as path/to/file",
        ),
        (["--family", "my.py:FAM", "--data", "my.py:DATA"], "my.py defines no family 'FAM': it defines FAMILY, OTHER"),
        (["--family", "my.py:NUMBER", "--data", "my.py:DATA"], "my.py defines no family 'NUMBER'"),
        (["--family", "my.py:broken", "--data", "my.py:DATA"], "my.py:broken fails: RuntimeError: out of order"),
        (
            ["--family", "my.py:FAMILY", "--data", "my.py:family"],
            "my.py:family returned Family: it must return a fedhen.FederatedData",
        ),
        (["--family", "my.py:FAMILY"], "which recipe? choose from digits"),
        (["digits", "--family", "mine"], "unknown model family 'mine'"),
        (["digits", "--task", "guess"], "unknown task 'guess'"),
    ],
)
def test_own_parts_that_are_wrong_are_one_line(
    here: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, "run", *arguments, *QUIET)
