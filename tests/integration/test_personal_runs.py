"""Runs with personal models: the command line, reports, the model of a device, and what privacy allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedhen
from fedhen.cli import main
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.errors import CheckpointError, ConfigError
from fedhen.experiment.build import build_experiment
from support.points import TINY
from support.tiny import TINY_OPTIONS


def train(folder: Path, personal: dict[str, Any], **more: Any) -> fedhen.Run:
    devices = {"number": 4, "active": 4}
    settings: dict[str, Any] = {**TINY, "devices": devices, "personal": personal, **more}
    return fedhen.run("digits", run_dir=folder, progress=False, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"), [("fedrep", {}), ("ditto", {}), ("finetune", {"adapt_epochs": 1}), ("proto", {})]
)
def test_the_model_of_a_device_has_its_recorded_score(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """`fedhen.load(run, device=...)`, on the device's own test data, against the value in the last record."""
    run = train(tmp_path / "run", {"name": name, **settings})
    population, record = run.experiment.population, run.rounds[-1]
    for device in (1, 3):
        tier = population.tier_of[device]
        place = [d for d, own in enumerate(population.tier_of) if own == tier].index(device)
        model = fedhen.load(tmp_path / "run", device=device)
        index = torch.from_numpy(population.data.test_shards[device])
        with torch.no_grad():
            found = model(population.data.test_inputs(index))[-1].argmax(1)
        share = float((found == population.data.y_test[index]).double().mean())
        assert share == record["own"]["personal"][tier][place]
        assert model.round == 2 and [*model.model_card.exits][-1] == tier
    for other in (4, -1, "3"):
        with pytest.raises(ConfigError, match=f"device {other} is not in .*: its devices are 0 to 3"):
            fedhen.load(tmp_path / "run", device=other)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_server_without_a_whole_model_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its scores are the means of the devices' own, in records and report; its model cannot be loaded."""
    folder = tmp_path / "run"
    options = [*TINY_OPTIONS, "--rounds=2", "--quiet", f"--run-dir={folder}", "--set=devices.held_out=0.5"]
    assert main(["run", "digits", "--personal=fedper", *options]) == 0
    record = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
    own = record["own"]["personal"]["complex"]
    assert "% on the devices’ own test data, on average (devices’ own models)" in capsys.readouterr().out
    run = fedhen.open_run(folder)
    assert "accuracy (devices’ own)" in repr(run) and "accuracy, devices’ own" in run._repr_html_()
    assert run.history[-1]["own personal complex accuracy"] == pytest.approx(own[0])
    assert record["accuracy"] == {"server": {t: pytest.approx(v[0]) for t, v in record["own"]["personal"].items()}}
    assert record["scored"] == "own models" and len(own) == 1 and "server" not in record["own"]
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "fedhen+fedper" in shown and "the server has no whole model" in shown
    assert (
        "Rounds to target (devices’ own models)" in shown and "server model)" not in shown and "server, " not in shown
    )
    assert "Accuracy of devices that never trained" in shown and "personal model, mean" in shown
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert 'id="held-out"' in page and "from the worst to the best" in page
    with pytest.raises(CheckpointError, match=r"only devices have whole models: fedhen\.load\(run, device=0\)"):
        fedhen.load(folder, "simple")


@pytest.mark.slow
def test_the_report_has_the_share_of_devices_that_are_hurt(tmp_path: Path) -> None:
    train(tmp_path / "run", {"name": "ditto"}, evaluation={"local_epochs": 1})
    text = fedhen.report(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    hurt = summary["own"]["personal"]["simple"]["hurt"]
    line = next(line for line in text.splitlines() if "personal model, hurt" in line)
    assert float(line.split()[-1]) == pytest.approx(100 * hurt, abs=0.1)
    assert "trained alone, mean" in text


def test_the_users_settings_take_precedence_over_those_of_personal_models() -> None:
    with pytest.raises(ConfigError, match=r"set evaluation\.devices=false"):
        fedhen.run("digits", progress=False, **TINY, personal={"name": "fedrep"}, evaluation={"devices": True})


def test_a_run_without_personal_models_has_none_to_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a tier or a device"):
        fedhen.load(tmp_path)
    fedhen.run("digits", run_dir=tmp_path / "run", progress=False, **{**TINY, "rounds": 1})
    with pytest.raises(ConfigError, match="has no personal models"):
        fedhen.load(tmp_path / "run", device=0)


PRIVATE = [
    *("privacy.mechanism=central", "privacy.bound=0.5", "privacy.noise=0.2", "evaluation.devices=false"),
    *("data.limit=80", "devices.number=4", "devices.active=2"),
]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["personal.name=fedper", "evaluation.own=true"], "scored with devices' own models"),
        (["personal.name=finetune", "evaluation.own=true"], r"set evaluation\.own=false"),
        (["devices.held_out=0.25"], r"set devices\.held_out=0"),
    ],
    ids=["fedper", "scores", "held out"],
)
def test_what_would_tell_of_devices_data_is_refused_under_privacy(settings: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_experiment(toml.apply_settings(load_recipe("digits"), [*PRIVATE, *settings]))


def test_ditto_is_allowed_under_privacy() -> None:
    """Only bounded and noisy changes of the shared model leave a device."""
    config = toml.apply_settings(load_recipe("digits"), [*PRIVATE, "personal.name=ditto", "model.widths=[4, 4, 8, 8]"])
    assert build_experiment(config).population.personal.copy
