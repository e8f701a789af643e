"""Operations in training, of every family and method, against products counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fedhen
from fedhen.algorithm.methods import load_method
from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.config.toml import apply_settings
from fedhen.data import sources
from fedhen.data.storage import data_root
from fedhen.devices.workload import measure_workload
from fedhen.experiment.build import build_population
from fedhen.experiment.choices import take_method
from fedhen.profiles.reading import read_profile
from fedhen.reports.spending import price_runs
from fedhen.runs.reader import read_run
from support.families import two_exits

STEM = 1 * 16 * 9 * 64
"""Multiplications of the digits' first convolution: 1 to 16 channels, 3×3, on 8×8 pixels."""
FIRST = STEM + 2 * 16 * 16 * 9 * 64 + (16 * 32 * 9 + 32 * 32 * 9 + 16 * 32) * 16
"""Of the first two stages: a block of two convolutions each, and a shortcut where the width changes."""
EXIT = 32 * 10
DEEP = (32 * 64 + 64 * 64) * 9 * 4 + 32 * 64 * 4 + (64 * 128 + 128 * 128) * 9 * 4 + 64 * 128 * 4 + 128 * 10


def measured(config: Config, method: str) -> dict[str, int]:
    chosen = take_method(config, method)
    data = sources.load_data(chosen.data, data_root(None), 0)
    return dict(measure_workload(build_population(chosen, load_method(method), data)).training_operations)


@pytest.mark.parametrize("method", ["fedhen", "noside", "decouple"])
def test_training_takes_six_operations_a_multiplication_but_in_the_first_layer(method: str) -> None:
    """Two each forward, backward to the inputs, and backward to the weights; nothing flows back to the images.

    Only FedHeN's complex devices train the early exit. The others compute it and do not go back through it.
    """
    found = measured(load_recipe("digits"), method)
    assert found["simple"] == 6 * (FIRST + EXIT) - 2 * STEM
    side = 6 * EXIT if method == "fedhen" else 2 * EXIT
    assert found["complex"] == 6 * (FIRST + DEEP) + side - 2 * STEM


def test_a_nest_by_width() -> None:
    """A quarter of the channels everywhere: 4, 8, 16 and 32, and no early exit."""
    found = measured(load_recipe("digits"), "heterofl")
    stem = 1 * 4 * 9 * 64
    two = stem + 2 * 4 * 4 * 9 * 64 + (4 * 8 * 9 + 8 * 8 * 9 + 4 * 8) * 16
    rest = (8 * 16 + 16 * 16) * 9 * 4 + 8 * 16 * 4 + (16 * 32 + 32 * 32) * 9 * 4 + 16 * 32 * 4 + 32 * 10
    assert found == {"simple": 6 * (two + rest) - 2 * stem, "complex": 6 * (FIRST + DEEP) - 2 * STEM}


SIMPLE = 6 * (FIRST + EXIT) - 2 * STEM
"""Of an example of a simple device in training, as above."""
BODY_ALONE = 6 * FIRST - 2 * STEM + 4 * EXIT
"""The same if the exit is not trained: forward through it, and backward to its inputs."""
OWN = ["evaluation.own=true", "evaluation.devices=false"]
PHASES: dict[str, tuple[list[str], list[tuple[float, int, int]]]] = {
    # Settings -> operations of an example, epochs and batches a step of each phase.
    "none": ([], []),
    "finetune": ([], []),
    "fedper": ([], []),
    "fedbabu": ([], [(BODY_ALONE, 3, 1)]),
    "fedrep": (["personal.epochs=4"], [(2 * FIRST + 4 * EXIT, 4, 1), (BODY_ALONE, 1, 1)]),
    "ditto": (["personal.epochs=2"], [(SIMPLE, 3, 1), (SIMPLE, 2, 1)]),
    # Three inner steps on one batch, and one on another.
    "perfedavg, first": (["personal.steps=3"], [(4 * SIMPLE / 2, 3, 2)]),
    # An inner step on the first, one on the second, two on the third.
    "perfedavg, hessian-free": (["personal.order=hessian-free"], [(4 * SIMPLE / 3, 3, 3)]),
}


@pytest.mark.parametrize("case", PHASES)
def test_personal_models_train_in_phases(case: str) -> None:
    settings, expected = PHASES[case]
    settings = [f"personal.name={case.partition(',')[0]}", *OWN, *settings]
    config = apply_settings(load_recipe("digits"), settings)
    data = sources.load_data(config.data, data_root(None), 0)
    found = measure_workload(build_population(config, load_method("fedhen"), data))
    assert [(phase.operations["simple"], phase.epochs, phase.batches) for phase in found.phases] == [
        (round(operations), epochs, batches) for operations, epochs, batches in expected
    ]
    assert found.training_operations["simple"] == SIMPLE


@pytest.mark.parametrize("case", ["perfedavg", "proto"])
def test_what_second_derivatives_and_prototypes_take_is_counted_by_torch(case: str) -> None:
    """Two linear layers, of 6×5 and 5×3: the gradient is computed here once more."""
    inputs, labels = torch.randn(20, 6), torch.arange(20) % 3
    data = fedhen.FederatedData.from_arrays(inputs, labels, inputs, labels)
    config = apply_settings(
        replace(Config(), devices=replace(Config().devices, number=4, active=2)),
        [f"personal.name={case}", *OWN, *["personal.order=full"][: case == "perfedavg"]],
    )
    (phase,) = measure_workload(build_population(config, fedhen.METHODS["fedhen"], data, two_exits())).phases
    if case == "proto":
        # Forward through both, and backward to the weights of the first: the other is not trained.
        assert phase.operations["simple"] == 2 * 45 + 2 * 30 and phase.batches == 2
        return
    first, second = (torch.randn(n, m, requires_grad=True) for n, m in ((5, 6), (3, 5)))
    x = torch.randn(4, 6)
    with FlopCounterMode(display=False) as counter:
        inner = (x @ first.T).relu() @ second.T
        moved = torch.autograd.grad(inner.logsumexp(1).sum(), [first, second], create_graph=True)
        ((x @ (first - moved[0]).T).relu() @ (second - moved[1]).T).logsumexp(1).sum().backward()  # type: ignore[no-untyped-call]
    assert phase.operations["simple"] == counter.get_total_flops() / 8


@pytest.mark.parametrize("tiers", [{"simple": 1}, {"simple": 1, "complex": 2}])
def test_transformers(tiers: dict[str, int]) -> None:
    """A block multiplies a position's w numbers with 12w weights each, and has 2·T·w for the attention.

    Tokens and positions are looked up, which takes no product. Attention counts the pairs that it masks too.
    """
    width, length, vocabulary = 8, 5, 7
    x = torch.randint(0, vocabulary, (20, length))
    data = fedhen.FederatedData.from_arrays(x, x, x[:4], x[:4])
    settings = [
        *("model.family=gpt", f"model.width={width}", "model.heads=2", "task.name=language-modelling"),
        f"model.exits={{{', '.join(f'{t} = {b}' for t, b in tiers.items())}}}",
        f"tiers={{{', '.join(f'{t} = {1 / len(tiers)}' for t in tiers)}}}",
        *("devices.number=4", "devices.active=2"),
    ]
    config = apply_settings(Config(method="fedhen"), settings)
    found = measure_workload(build_population(config, fedhen.METHODS["fedhen"], data))
    block, head = length * 12 * width**2 + 2 * length**2 * width, length * width * vocabulary
    for tier, blocks in tiers.items():
        exits = [each for each in tiers.values() if each <= blocks]
        assert found.training_operations[tier] == 6 * (blocks * block + len(exits) * head)
        assert found.operations[tier] == 2 * (blocks * block + len(exits) * head)


def test_a_family_of_ones_own() -> None:
    """Products of 6×5 and 5×3, and in the complex model 5×4 and 4×3; the first has no gradient to its inputs."""
    data = fedhen.FederatedData.from_arrays(torch.randn(20, 6), torch.arange(20) % 3)
    config = replace(Config(), devices=replace(Config().devices, number=4, active=2))
    found = measure_workload(build_population(config, fedhen.METHODS["fedhen"], data, two_exits()))
    assert found.examples == [5, 5, 5, 5]
    assert found.operations == {"simple": 2 * 45, "complex": 2 * 77}
    assert found.training_operations == {"simple": 6 * 45 - 2 * 30, "complex": 6 * 77 - 2 * 30}


def test_a_run_records_its_workload(tmp_path: Path) -> None:
    data = fedhen.FederatedData.from_devices([(torch.randn(n, 6), torch.arange(n) % 3) for n in (3, 5, 4, 8)])
    fedhen.train(two_exits(), data, run_dir=tmp_path / "run", rounds=1, devices={"active": 2}, accelerator="cpu")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["examples"] == [3, 5, 4, 8]
    assert set(summary["training_operations"]) == {"simple", "complex"} and "tier_examples" not in summary
    private: dict[str, Any] = {"privacy": {"mechanism": "bounded", "bound": 1.0}, "devices": {"active": 2}}
    fedhen.train(two_exits(), data, run_dir=tmp_path / "private", rounds=1, accelerator="cpu", **private)
    summary = json.loads((tmp_path / "private" / "summary.json").read_text())
    assert "examples" not in summary and summary["tier_examples"] == {"simple": 8, "complex": 12}


def test_a_priced_run_has_its_phases(tmp_path: Path) -> None:
    """Ditto with as many epochs of its copy computes twice as much; a run that did not record it is measured again."""
    settings: dict[str, Any] = {"rounds": 1, "devices": {"number": 4, "active": 2}, "accelerator": "cpu"}
    runs = {}
    for name in ("none", "ditto"):
        folder = tmp_path / name
        fedhen.run("digits", run_dir=folder, personal={"name": name}, progress=False, **settings)
        runs[name] = read_run(folder)
    plain, ditto = (price_runs([run], read_profile("phones"), print)[str(run.folder)] for run in runs.values())
    assert ditto.operations == [2 * each for each in plain.operations]
    path = tmp_path / "ditto" / "summary.json"
    summary = json.loads(path.read_text())
    del summary["phases"]
    path.write_text(json.dumps(summary))
    said: list[str] = []
    run = read_run(tmp_path / "ditto")
    assert price_runs([run], read_profile("phones"), said.append)[str(run.folder)].operations == ditto.operations
    assert len(said) == 1 and "did not record" in said[0]
