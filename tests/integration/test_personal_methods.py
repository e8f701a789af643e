"""Every way to personal models on the digits: what is trained, kept, sent, scored and refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedhen.algorithm.methods import load_method
from fedhen.algorithm.personal import ALL, Personal, Phase
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.data.dataset import Data
from fedhen.engines.sequential import SequentialDevices
from fedhen.errors import ConfigError
from fedhen.experiment.build import build_experiment, start_experiment
from fedhen.experiment.experiment import Experiment
from support.tiny import TINY


def play(experiment: Experiment) -> Experiment:
    for _ in experiment.play():
        pass
    return experiment


def digits(*settings: str, data: Data | None = None) -> tuple[Experiment, list[dict[str, Any]]]:
    chosen = [*TINY, "evaluation.own=true", "evaluation.devices=false", "evaluation.every=2", "rounds=2", *settings]
    config = toml.apply_settings(load_recipe("digits"), [*chosen, "runtime.workers=1"])
    run = build_experiment(load_method(config.method).keep_tiers(config), data=data)
    return run, [step.record for step in run.play()]


def weights_of(run: Experiment) -> dict[str, bytes]:
    found = {
        f"{tier} {name}": tensor.numpy().tobytes()
        for tier, weights in run.server.items()
        for name, tensor in weights.items()
    }
    return found | {f"memory {device}": run.memory.vector(device).numpy().tobytes() for device in run.memory}


def test_finetuning_with_zero_steps_equals_the_servers_scores() -> None:
    _, records = digits("personal.name=finetune", "personal.adapt_epochs=0")
    assert records[-1]["own"]["personal"] == records[-1]["own"]["server"]


def test_fedper_with_nothing_personal_equals_the_plain_run_to_the_byte() -> None:
    config = toml.apply_settings(load_recipe("digits"), [*TINY, "rounds=2", "evaluation.own=true", "runtime.workers=1"])
    config = replace(config, evaluation=replace(config.evaluation, devices=False))
    plain = play(build_experiment(config))
    population = plain.population
    nothing = Personal("fedper", (Phase(ALL, config.training.epochs),), sends_part=False)
    again = play(start_experiment(replace(population, personal=nothing, fixed={})))
    assert {n: b for n, b in weights_of(again).items() if not n.startswith("memory")} == weights_of(plain)


METHODS = {
    "finetune": ["personal.adapt_epochs=1"],
    "fedper": [],
    "fedrep": [],
    "fedbabu": ["personal.adapt_epochs=1"],
    "ditto": ["personal.adapt_epochs=1"],
    "perfedavg": ["personal.order=full"],
    "proto": ["training.batch_size=5"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_test_data_changes_no_trained_weight(name: str) -> None:
    """The test images are replaced by noise: scores change, and nothing else."""
    run, records = digits(f"personal.name={name}", "task.metrics=['loss']", *METHODS[name])
    data = run.population.data
    assert isinstance(data.x_test, Tensor)
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 17, tuple(data.x_test.shape)).astype(np.uint8))
    other = start_experiment(replace(run.population, data=replace(data, x_test=noise), unsent={}))
    again = [step.record for step in other.play()]
    assert weights_of(other) == weights_of(run)
    assert [r["loss"] for r in again] == [r["loss"] for r in records]
    assert again[-1]["own"] != records[-1]["own"]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "settings",
    [
        ["method=noside", "local.name=fedprox"],
        ["method=decouple", "local.name=scaffold"],
        ["method=fedavg", "local.name=feddyn"],
    ],
    ids="-".join,
)
def test_every_method_goes_with_methods_and_local_variants(name: str, settings: list[str]) -> None:
    """Every device has a score of its own model, and the losses are finite."""
    _, records = digits(f"personal.name={name}", *METHODS[name], *settings)
    personal = records[-1]["own"]["personal"]
    assert all(value is not None for values in personal.values() for value in values)
    assert all(record["loss"] is not None for record in records)
    assert ("server" in records[-1]["own"]) == (name not in ("fedper", "fedrep", "proto"))
    assert records[-1].get("scored", "") == ("" if "server" in records[-1]["own"] else "own models")


def test_what_is_personal_is_not_counted_as_sent() -> None:
    """The last layer of an exit is a matrix and a bias, in four bytes a number, for one device of the tier."""
    run, records = digits("personal.name=fedper", "devices.active=4")
    _, plain = digits("devices.active=4")
    held = run.population.holdings
    assert {tier: [*holding.personal] for tier, holding in held.items()} == {
        "simple": ["exits.2.2.weight", "exits.2.2.bias"],
        "complex": ["exits.4.1.weight", "exits.4.1.bias"],
    }
    for tier, inputs in (("simple", 4), ("complex", 8)):
        for way in ("down", "up"):
            saved = plain[0]["bytes"][way][tier] - records[0]["bytes"][way][tier]
            assert saved == 2 * 4 * (10 * inputs + 10)


REFUSED = {
    "tiers share": (["personal.name=fedper", "personal.part=['stem']"], r"stem.* which tiers simple and complex share"),
    "nothing named": (["personal.name=fedper", "personal.part=['head']"], r"names nothing .*'head'"),
    "no effect": (["personal.name=fedper", "personal.pull=2"], r"personal\.pull has no effect"),
    "no classes": (["personal.name=proto", "task.name=regression"], "choose a task|needs classes"),
    "no server model": (["personal.name=fedrep", "evaluation.own=false"], r"set evaluation\.own=true"),
    "hidden": (["personal.name=fedper", "evaluation.validation=0.1"], r"set evaluation\.validation=0"),
    "too few": (["devices.held_out=0.5", "devices.active=3"], r"devices\.held_out=0\.5 leaves 2 devices"),
    "inner steps": (["personal.name=perfedavg", "personal.order=hessian-free", "personal.steps=2"], r"steps=1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(case: str) -> None:
    settings, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason) as caught:
        digits(*settings)
    assert "\n" not in str(caught.value)


def test_with_the_tiers_apart_a_body_may_be_personal() -> None:
    """As in LG-FedAvg: the exits are averaged, within each tier."""
    run, _ = digits("personal.name=fedper", "personal.part=['stem', 'stages']", "method=decouple")
    assert all(name.startswith("exits.") for weights in run.server.values() for name in weights)


def test_held_out_devices_never_train() -> None:
    run, records = digits("devices.held_out=0.25", "devices.number=8", "devices.active=6", "personal.name=finetune")
    held_out = run.population.held_out
    assert len(held_out) == 2 and sorted(run.population.tier_of[d] for d in held_out) == ["complex", "simple"]
    assert not held_out.intersection(device for record in records for device in record["active"])
    found = records[-1]["held_out"]
    assert {owner: {tier: len(v) for tier, v in each.items()} for owner, each in found.items()} == {
        owner: {"simple": 1, "complex": 1} for owner in ("server", "personal")
    }
    assert {tier: len(v) for tier, v in records[-1]["own"]["server"].items()} == {"simple": 3, "complex": 3}


def test_local_training_stands_beside_after_the_last_round() -> None:
    """Alone, from the initial weights: the same whatever the method does."""
    _, records = digits("personal.name=ditto", "evaluation.local_epochs=1", "evaluation.every=1")
    _, plain = digits("evaluation.local_epochs=1", "seed=0", "method=noside", "server.optimizer=momentum")
    assert "local" not in records[0]["own"] and "local" in records[1]["own"]
    assert set(records[1]["own"]) == {"server", "personal", "local"}
    assert plain[-1]["own"]["local"]["simple"] == records[1]["own"]["local"]["simple"]


def test_an_exit_that_never_travels_is_the_same_on_every_device() -> None:
    """Else the shared body would learn for two random exits at once: the simple exit is in both tiers' models."""
    run, _ = digits("personal.name=fedbabu", "rounds=1", "evaluation.every=1", "personal.adapt_epochs=0")
    devices = SequentialDevices(run.population)
    simple, complex_ = (devices.build_module(tier).state_dict() for tier in ("simple", "complex"))
    assert torch.equal(simple["exits.2.2.weight"], complex_["exits.2.2.weight"])
    assert torch.equal(run.complete_models()["server"]["simple"]["exits.2.2.weight"], simple["exits.2.2.weight"])


def test_an_exit_or_all_exits_are_personal() -> None:
    """A complex device of FedHeN has two exits; a simple one has one."""
    for part, exits in (("exit", {"4"}), ("exits", {"2", "4"})):
        run, _ = digits("personal.name=fedper", f"personal.part=['{part}']", "rounds=1", "evaluation.every=1")
        assert {name.split(".")[1] for name in run.population.parts["complex"]} == exits
        assert {name.split(".")[1] for name in run.population.parts["simple"]} == {"2"}
