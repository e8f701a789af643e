"""fedhen from Python: recipes, comparisons, settings as objects, and rounds one by one."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fedhen
from fedhen.cli import main
from support.marks import first_is_quick
from support.points import SMALL, TINY, family, points
from support.tiny import TINY_OPTIONS

ALIKE = ["--set=runtime.workers=1", "--accelerator", "cpu", "--quiet", "--rounds", "2"]
"""Options for the same run as `TINY`."""


def files(folder: Path) -> dict[str, bytes]:
    """Returns what of a run's files does not depend on the machine."""
    found = [folder / "config.toml", folder / "rounds.jsonl", *sorted((folder / "models").iterdir())]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def configured(*given: Any, **settings: Any) -> dict[str, Any]:
    """Returns the configuration of a run that is begun and not played."""
    return fedhen.rounds(*given, accelerator="cpu", **settings).run.record.config


@pytest.mark.parametrize("method", first_is_quick(["noside", "heterofl", "fedavg"]))
def test_a_recipe_is_the_run_of_the_command(method: str, tmp_path: Path) -> None:
    command = ["run", "digits", "--method", method, *TINY_OPTIONS, *ALIKE]
    assert main([*command, "--run-dir", str(tmp_path / "a")]) == 0
    run = fedhen.run("digits", method, run_dir=tmp_path / "b", **TINY)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert run.rounds == [json.loads(line) for line in (tmp_path / "a" / "rounds.jsonl").open()]
    again = fedhen.run(tmp_path / "a" / "config.toml", run_dir=tmp_path / "c", accelerator="cpu")
    assert files(tmp_path / "c") == files(tmp_path / "a") and again.accuracy == run.accuracy


def test_settings_may_be_tables_sections_or_a_configuration() -> None:
    four = {"devices": {"number": 4, "active": 2}}
    tables = {"rounds": 2, "training": {"lr": 0.05, "batch_size": 8}, "evaluation": {"every": 1}}
    training, evaluation = fedhen.TrainingConfig(lr=0.05, batch_size=8), fedhen.EvaluationConfig(every=1)
    whole = fedhen.Config(rounds=2, training=training, evaluation=evaluation)
    other = fedhen.Config(rounds=9, training=training)
    ways: list[dict[str, Any]] = [
        tables,
        {"rounds": 2, "training": training, "evaluation": evaluation},
        {"config": whole},
        {"config": other, "rounds": 2, "evaluation": {"every": 1}},
    ]
    found = [configured(family(), points(), **four, **each) for each in ways]
    assert all(each == found[0] for each in found)
    assert found[0]["rounds"] == 2 and found[0]["training"]["lr"] == 0.05 and found[0]["data"]["name"] == "python"


def test_a_table_changes_a_recipe_and_a_section_replaces_it() -> None:
    """The recipe digits has 3 epochs, the default is 5."""
    table = configured("digits", training={"lr": 0.05})["training"]
    section = configured("digits", training=fedhen.TrainingConfig(lr=0.05))["training"]
    assert (table["lr"], table["epochs"], table["batch_size"]) == (0.05, 3, 14)
    assert (section["lr"], section["epochs"], section["batch_size"]) == (0.05, 5, 50)
    with pytest.raises(fedhen.ConfigError, match="training must be a table, found DevicesConfig"):
        configured("digits", training=fedhen.DevicesConfig())


def test_data_that_comes_split_decides_the_number_of_devices_of_a_section() -> None:
    x, y = torch.randn(40, 6).double(), torch.arange(40) % 3
    data = fedhen.FederatedData.from_devices([(x[k::4], y[k::4]) for k in range(4)])
    devices = fedhen.DevicesConfig(active=2)
    for found in (
        configured(family(), data, devices=devices),
        configured(family(), data, config=fedhen.Config(devices=devices)),
        configured("digits", family=family(), data=data, devices=devices),
    ):
        assert (found["devices"]["number"], found["devices"]["active"]) == (4, 2)
    with pytest.raises(fedhen.ConfigError, match=r"devices\.number=3, but data is given for 4 devices"):
        configured(family(), data, devices=fedhen.DevicesConfig(number=3, active=2))


def test_own_models_and_data_take_the_place_of_a_recipes() -> None:
    found = configured("digits", family=family(), data=points())
    assert (found["recipe"], found["targets"]) == ("digits-on-own-data", {})
    assert (found["model"]["family"], found["data"]["name"], found["data"]["limit"]) == ("python", "python", 0)
    assert found["training"]["epochs"] == 3, "the rest is the recipe's"
    three = fedhen.Family(dict.fromkeys(("a", "b", "c"), lambda: torch.nn.Linear(6, 3)))
    with pytest.raises(fedhen.FedhenError, match="tier 'a'"):
        configured("digits", family=three, data=points())


def test_rounds_are_played_one_by_one(tmp_path: Path) -> None:
    seen = []
    rounds = fedhen.rounds(family(), points(), run_dir=tmp_path / "one", **SMALL)
    for record in rounds:
        assert len((tmp_path / "one" / "rounds.jsonl").read_text().splitlines()) == record["round"]
        assert rounds.run.rounds[-1] == record
        seen.append(record)
    whole = fedhen.train(family(), points(), run_dir=tmp_path / "all", **SMALL)
    assert seen == whole.rounds and files(tmp_path / "one") == files(tmp_path / "all")
    weights = rounds.run.model("simple").state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in whole.model("simple").state_dict().items())
    assert [record["round"] for record in fedhen.rounds("digits", **TINY)] == [1, 2]


@pytest.mark.parametrize("block", [True, False])
def test_leaving_the_loop_saves_the_last_round(block: bool, tmp_path: Path) -> None:
    """No checkpoint is due before. The resumed run has the bytes of one that was not interrupted."""
    if block:
        with fedhen.rounds(family(), points(), run_dir=tmp_path / "cut", **SMALL) as rounds:
            assert [next(rounds)["round"], next(rounds)["round"]] == [1, 2]
    else:
        for record in fedhen.rounds(family(), points(), run_dir=tmp_path / "cut", **SMALL):
            if record["round"] == 2:
                break
    cut = fedhen.open_run(tmp_path / "cut")
    assert (
        len(cut.rounds) == 2 and cut.record.summary is None and cut.accuracy["server"].keys() == {"simple", "complex"}
    )
    resumed = fedhen.resume(tmp_path / "cut", family=family(), data=points(), accelerator="cpu")
    fedhen.train(family(), points(), run_dir=tmp_path / "all", **SMALL)
    assert len(resumed.rounds) == 3 and files(tmp_path / "cut") == files(tmp_path / "all")


def test_a_run_that_is_not_evaluated_yet_has_no_model() -> None:
    rounds = fedhen.rounds(family(), points(), **SMALL)
    next(rounds)
    with pytest.raises(fedhen.FedhenError, match="no round of this run was evaluated"):
        rounds.run.model("simple")
    with pytest.raises(fedhen.DataError, match="its metrics are none yet"):
        _ = rounds.run.accuracy


@pytest.mark.slow
def test_a_comparison_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "digits", "--methods", "fedhen,noside", "--seeds", "1,0", *TINY_OPTIONS, *ALIKE]
    assert main([*command, "--run-dir", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    found = fedhen.compare("digits", ("fedhen", "noside"), seeds=(1, 0), run_dir=tmp_path / "b", **TINY)
    names = ["fedhen-seed0", "noside-seed0", "fedhen-seed1", "noside-seed1"]
    assert [run.folder for run in found.runs] == [tmp_path / "b" / name for name in names]
    assert all(files(tmp_path / "a" / name) == files(tmp_path / "b" / name) for name in names)
    assert (tmp_path / "b" / "report.html").is_file()
    table = found.text.split("\n\n")[0]
    assert "fedhen (n = 2)" in table and table in printed and str(found) == found.text
    assert [(row["method"], row["seed"], row["round"]) for row in found.history][:3] == [
        *(("fedhen", 0, 1), ("fedhen", 0, 2), ("noside", 0, 1))
    ]
    assert repr(found) == "<Comparison of fedhen, noside on digits: 4 runs>"


def test_a_method_from_a_file_is_asked_for_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import fedhen\nMINE = fedhen.Method('mine', fedhen.last_exit, fedhen.share_common_weights)\n")
    run = fedhen.train(family(), points(), f"{file}:MINE", run_dir=tmp_path / "run", **SMALL)
    assert run.rounds == fedhen.train(family(), points(), "noside", **SMALL).rounds
    again: dict[str, Any] = {"family": family(), "data": points(), "rounds": 4, "accelerator": "cpu"}
    with pytest.raises(fedhen.FedhenError, match="from Python as method="):
        fedhen.resume(tmp_path / "run", **again)
    assert len(fedhen.resume(tmp_path / "run", method=f"{file}:MINE", **again).rounds) == 4


def test_a_comparison_writes_nothing_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = fedhen.compare(methods=["fedhen", "decouple"], family=family(), data=points(), **SMALL)
    assert [*tmp_path.iterdir()] == [] and {run.record.recipe for run in found.runs} == {"custom"}
    assert "Rounds to target" in found.text and "&lt;" not in found.text
    data = points()
    for run in found.runs:
        right = run.model("complex")(data.x_test)[-1].argmax(1) == data.y_test
        assert right.float().mean().item() == pytest.approx(run.accuracy["server"]["complex"])
    with pytest.raises(fedhen.FedhenError, match="this run has no experiment"):
        _ = found.runs[0].experiment


@pytest.mark.parametrize("where", ["in a round", "in a callback"])
def test_ctrl_c_in_python_saves_the_last_round(where: str, tmp_path: Path) -> None:
    def activate(number: int, losses: object) -> list[int]:
        if number == 4 and where == "in a round" and not resuming:
            raise KeyboardInterrupt
        return [number % 4]

    def stop(record: dict[str, Any]) -> None:
        if record["round"] == 3 and where == "in a callback":
            raise KeyboardInterrupt

    resuming = False
    settings: dict[str, Any] = {**SMALL, "rounds": 6, "checkpoint": {"minutes": 60}, "accelerator": "cpu"}
    with pytest.raises(KeyboardInterrupt) as stopped, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fedhen.train(
            family(),
            points(),
            run_dir=tmp_path / "run",
            activate=activate,
            callbacks=[stop],
            **settings,
        )
    if where == "in a round":
        call = f"fedhen.resume('{tmp_path / 'run'}', family=family, data=data)"
        assert stopped.value.__notes__ == [f"fedhen: stopped after round 3; resume with: {call}"]
    with pytest.warns(UserWarning, match="models are of round 3 of 6"):
        assert fedhen.load(tmp_path / "run", "simple", family=family()).round == 3
    resuming = True
    resumed = fedhen.resume(tmp_path / "run", family=family(), data=points(), activate=activate, progress=False)
    whole = fedhen.train(family(), points(), activate=activate, **settings)
    assert resumed.rounds == whole.rounds
