"""The server's models on each device's own test data: `evaluation.own`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedhen
from fedhen.cli import main
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.errors import ConfigError
from fedhen.experiment.build import build_experiment
from fedhen.runs.reader import read_run
from support.tiny import TINY, TINY_OPTIONS

OWN = [*TINY, "evaluation.own=true", "evaluation.every=1", "rounds=2", "split.kind=dirichlet", "runtime.workers=1"]


def play(*settings: str, tiers: dict[str, float] | None = None, data: Any = None) -> tuple[Any, list[dict[str, Any]]]:
    config = toml.apply_settings(load_recipe("digits"), [*OWN, *settings])
    run = build_experiment(config if tiers is None else config.with_tiers(tiers), data=data)
    return run, [step.record for step in run.play()]


def test_each_test_image_is_scored_once() -> None:
    """With one tier, the devices' accuracies weighted by their test images are the accuracy on the whole test set."""
    run, records = play(tiers={"complex": 1.0})
    sizes = [len(shard) for shard in run.population.data.test_shards]
    assert sum(sizes) == 80
    for record in records:
        found = record["own"]["server"]["complex"]
        right = sum(value * size for value, size in zip(found, sizes, strict=True) if value is not None)
        assert right / 80 == pytest.approx(record["accuracy"]["server"]["complex"], abs=1e-12)


def test_a_tier_is_scored_with_its_own_model() -> None:
    """Against torch: the model of each device's tier, loaded from the run's last state, on the device's images."""
    run, records = play()
    population = run.population
    for tier, values in records[-1]["own"]["server"].items():
        module = population.family.build(tier).eval()
        module.load_state_dict({**run.server[tier], **population.fixed[tier]}, strict=False)
        devices = [d for d, own in enumerate(population.tier_of) if own == tier]
        for device, value in zip(devices, values, strict=True):
            index = torch.from_numpy(population.data.test_shards[device])
            with torch.no_grad():
                found = module(population.data.test_inputs(index))[-1].argmax(1)
            expected = float((found == population.data.y_test[index]).double().mean()) if len(index) else None
            assert value == expected


def test_scoring_on_own_data_changes_no_round() -> None:
    """The same run without it has the same records but for `own`."""
    _, records = play()
    _, plain = play("evaluation.own=false")
    assert [{k: v for k, v in record.items() if k != "own"} for record in records] == plain


def test_a_device_without_test_data_has_no_value() -> None:
    rng = np.random.default_rng(0)
    devices: list[Any] = [(rng.random((8, 1, 8, 8), dtype=np.float32), [0, 1] * 4) for _ in range(4)]
    devices[1:3] = [(x, y, x[:2], y[:2]) for x, y in devices[1:3]]
    data = fedhen.FederatedData.from_devices(devices)
    _, records = play("data.limit=0", data=data)
    server = records[-1]["own"]["server"]
    assert server["simple"][0] is None and server["simple"][1] is not None
    assert server["complex"][0] is not None and server["complex"][1] is None


def test_own_scores_need_test_data() -> None:
    data = fedhen.FederatedData.from_arrays(np.zeros((40, 1, 8, 8), np.float32), [0, 1] * 20)
    with pytest.raises(ConfigError, match=r"evaluation\.own .* there is no test data"):
        play("data.limit=0", data=data)


@pytest.mark.slow
def test_records_summary_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report has the mean of the recorded values, and a chart of them on the page and as files."""
    options = [*TINY_OPTIONS, "--set=evaluation.own=true", "--rounds=1", "--quiet", f"--run-dir={tmp_path / 'run'}"]
    assert main(["run", "digits", "--method=fedhen", *options]) == 0
    assert main(["report", str(tmp_path / "run")]) == 0
    run = read_run(tmp_path / "run")
    values = [value for value in run.rounds[-1].own["server"]["simple"] if value is not None]
    mean = sum(values) / len(values)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["own"]["server"]["simple"]["mean"] == pytest.approx(mean)
    shown = next(line for line in capsys.readouterr().out.splitlines() if "server’s model, mean" in line)
    assert float(shown.split()[-1]) == pytest.approx(100 * mean, abs=0.005)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert 'id="own-data"' in page and "from the worst to the best" in page
    assert (tmp_path / "run" / "own-data.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2])
def test_workers_score_the_same(workers: int) -> None:
    config = toml.apply_settings(load_recipe("digits"), OWN)
    one, several = (
        [step.record for step in build_experiment(replace(config, runtime=replace(config.runtime, workers=n))).play()]
        for n in (1, workers)
    )
    assert one == several
