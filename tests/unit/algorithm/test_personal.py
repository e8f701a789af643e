"""Personal models on a few numbers and two tiers, with every update worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedhen import Family, Method
from fedhen.algorithm.merging import share_common_weights
from fedhen.algorithm.personal import ALL, Personal, Phase
from fedhen.config import toml, validation
from fedhen.config.recipes import load_recipe
from fedhen.data.dataset import Data
from fedhen.engines.personal_models import PersonalModels
from fedhen.engines.sequential import SequentialDevices
from fedhen.errors import ConfigError
from fedhen.experiment.build import build_experiment, start_experiment
from fedhen.experiment.experiment import Experiment
from support.tiny import TINY

LR = 0.1
CURVATURES = np.array([1.0, 2.0, 4.0, 0.5, 3.0, 1.5])
CENTRES = np.array([2.0, -3.0, 1.0, 5.0, 0.5, -1.0])
SIMPLE, COMPLEX = (0, 1, 2), (3, 4, 5)


class Sum(nn.Module):
    """Exits √k·(a − c), and √k·(a + b − c) for the deep tier, for inputs (√k, c)."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(2, dtype=torch.float64)) if deep else None

    def forward(self, x: Tensor) -> list[Tensor]:
        root, centre = x[:, :2], x[:, 2:]
        exits = [root * (self.a - centre)]
        return exits if self.b is None else [*exits, root * (self.a + self.b - centre)]


FAMILY = Family({"simple": lambda: Sum(False), "complex": lambda: Sum(True)})


def half_square(logits: Any, labels: Tensor) -> Tensor:
    """k/2·(s − c)² for each coordinate, with s = a or a + b: its gradient is k·(s − c)."""
    found: Tensor = logits[-1].square().sum(1).mean() / 2
    return found


LAST = Method("last", half_square, share_common_weights)


def federation(scale: float = 1.0) -> Data:
    rows = [[np.sqrt(scale * k)] * 2 + [c] * 2 for k, c in zip(CURVATURES, CENTRES, strict=True)]
    x = torch.tensor(np.repeat(rows, 4, axis=0))
    y = torch.arange(len(x)) % 2
    shards = tuple(np.arange(4 * d, 4 * d + 4) for d in range(6))
    return Data(x, y, x, y, 2, shards, shards)


def start(personal: dict[str, Any], data: Data | None = None, **more: Any) -> Experiment:
    """All devices active, whole shards as batches, no decay and no clip that bites."""
    settings = {
        "method": "last",
        "rounds": 2,
        "devices": {"number": 6, "active": 6},
        "tiers": {"simple": 0.5, "complex": 0.5},
        "model": {"family": "python"},
        "training": {"epochs": 1, "batch_size": 100, "lr": LR, "weight_decay": 0.0, "clip": 1e9},
        "evaluation": {"every": 2, "own": True, "devices": False},
        "personal": personal,
        **more,
    }
    config = validation.from_mapping(settings)
    return build_experiment(config, data=data or federation(), family=FAMILY, method=LAST, accelerator="cpu")


def play(experiment: Experiment) -> Experiment:
    for _ in experiment.play():
        pass
    return experiment


def slope(device: int, total: float) -> float:
    """∇f of a device at the sum of its weights."""
    return float(CURVATURES[device] * (total - CENTRES[device]))


def check(found: Tensor, expected: float) -> None:
    np.testing.assert_allclose(found.numpy(), [expected] * 2, rtol=1e-12, atol=1e-13)


def test_fedper_by_hand() -> None:
    """b stays on each device; a is averaged over all six."""
    run = play(start({"name": "fedper", "part": ["b"]}))
    a, b = 0.0, dict.fromkeys(COMPLEX, 0.0)
    for _ in range(2):
        steps = [LR * slope(d, a + b.get(d, 0.0)) for d in range(6)]
        b = {d: b[d] - steps[d] for d in COMPLEX}
        a -= sum(steps) / 6
    assert [*run.server["complex"]] == ["a"]
    check(run.server["simple"]["a"], a)
    for device in COMPLEX:
        check(run.memory[device]["personal/b"], b[device])


def test_fedrep_by_hand() -> None:
    """Two epochs of b, then one of a, at the new b. A simple device has no b and trains a alone."""
    run = play(start({"name": "fedrep", "part": ["b"], "epochs": 2}))
    a, b = 0.0, dict.fromkeys(COMPLEX, 0.0)
    for _ in range(2):
        for d in COMPLEX:
            for _ in range(2):
                b[d] -= LR * slope(d, a + b[d])
        a -= sum(LR * slope(d, a + b.get(d, 0.0)) for d in range(6)) / 6
    check(run.server["complex"]["a"], a)
    for device in COMPLEX:
        check(run.memory[device]["personal/b"], b[device])


def test_fedrep_without_body_epochs_leaves_the_server_as_it_was() -> None:
    run = play(start({"name": "fedrep", "part": ["b"], "body_epochs": 0}))
    check(run.server["complex"]["a"], 0.0)
    assert bool(run.memory[3]["personal/b"].any())


def test_fedbabu_by_hand() -> None:
    """b keeps its start, 0, and nothing is kept of it; then all of the model is fine-tuned."""
    run = play(start({"name": "fedbabu", "part": ["b"], "adapt_epochs": 2, "adapt_lr": 0.2}))
    a = 0.0
    for _ in range(2):
        a -= sum(LR * slope(d, a) for d in range(6)) / 6
    assert [*run.server["complex"]] == ["a"] and not len(run.memory)
    check(run.server["complex"]["a"], a)
    tuned, b = a, 0.0
    for _ in range(2):
        step = 0.2 * slope(4, tuned + b)
        tuned, b = tuned - step, b - step
    module = personal_model(run, 4)
    check(module.a.detach(), tuned)
    check(module.b.detach(), b)


def personal_model(run: Experiment, device: int) -> Any:
    return PersonalModels(SequentialDevices(run.population, run.memory)).make_own(2, run.server, device)


@pytest.mark.parametrize("pull", [0.0, 0.7])
def test_ditto_by_hand(pull: float) -> None:
    """The server is as without it; v starts from the model that was received first. λ = 0 is training alone."""
    run, plain = play(start({"name": "ditto", "pull": pull, "epochs": 2})), play(start({}))
    for tier, weights in plain.server.items():
        for name, tensor in weights.items():
            assert torch.equal(run.server[tier][name], tensor)
    w = {"a": 0.0, "b": 0.0}
    v = {d: dict(w) for d in range(6)}
    for _ in range(2):
        for d in range(6):
            own = ("a", "b") if d in COMPLEX else ("a",)
            for _ in range(2):
                g = slope(d, sum(v[d][n] for n in own))
                v[d] |= {n: v[d][n] - LR * (g + pull * (v[d][n] - w[n])) for n in own}
        steps = {d: LR * slope(d, w["a"] + (w["b"] if d in COMPLEX else 0)) for d in range(6)}
        w = {"a": w["a"] - sum(steps.values()) / 6, "b": w["b"] - sum(steps[d] for d in COMPLEX) / 3}
    check(run.server["complex"]["b"], w["b"])
    for device in range(6):
        check(run.memory[device]["copy/a"], v[device]["a"])
    check(run.memory[5]["copy/b"], v[5]["b"])


def test_ditto_without_a_gradient_returns_to_the_server() -> None:
    """v ← v − ηλ·(v − w) with ηλ = 1 is w, wherever v was."""
    run = start({"name": "ditto", "pull": 1 / LR}, federation(scale=0.0))
    run.memory[3] = {"copy/a": torch.ones(2, dtype=torch.float64), "copy/b": -torch.ones(2, dtype=torch.float64)}
    play(run)
    check(run.memory[3]["copy/a"], 0.0)
    check(run.memory[3]["copy/b"], 0.0)


ORDERS: dict[str, Callable[[float, int], float]] = {
    "first": lambda curvature, weights: 1.0,
    # H of k/2·(a + b − c)² is k·[[1, 1], [1, 1]], and (1, 1) is its eigenvector to 2·k.
    "hessian-free": lambda curvature, weights: 1 - 0.05 * curvature * weights,
    "full": lambda curvature, weights: 1 - 0.05 * curvature * weights,
}


@pytest.mark.parametrize("order", ORDERS)
def test_perfedavg_by_hand(order: str) -> None:
    """s̃ = s − α·m·k·(s − c) for m weights that add up to s; the outer gradient is (I − α·H)·k·(s̃ − c)."""
    epochs = 3 if order == "hessian-free" else 2
    training = {"epochs": epochs, "batch_size": 100, "lr": LR, "weight_decay": 0.0, "clip": 1e9}
    run = play(start({"name": "perfedavg", "order": order, "alpha": 0.05, "beta": 0.03}, training=training))
    a, b = 0.0, 0.0
    for _ in range(2):
        steps = []
        for d in range(6):
            number, total = (2, a + b) if d in COMPLEX else (1, a)
            inner = total - 0.05 * number * slope(d, total)
            steps.append(0.03 * ORDERS[order](CURVATURES[d], number) * slope(d, inner))
        a, b = a - sum(steps) / 6, b - sum(steps[3:]) / 3
    np.testing.assert_allclose(run.server["complex"]["a"].numpy(), [a] * 2, rtol=1e-9)
    np.testing.assert_allclose(run.server["complex"]["b"].numpy(), [b] * 2, rtol=1e-9)
    # Adapted by one step of α.
    step = 0.05 * slope(3, a + b)
    np.testing.assert_allclose(personal_model(run, 3).a.detach().numpy(), [a - step] * 2, rtol=1e-9)


def test_finetuning_adapts_the_servers_model() -> None:
    run = play(start({"name": "finetune", "part": ["b"], "adapt_epochs": 1}))
    a, b = (float(run.server["complex"][name][0]) for name in ("a", "b"))
    module = personal_model(run, 5)
    check(module.a.detach(), a)
    check(module.b.detach(), b - LR * slope(5, a + b))


def digits(*settings: str, data: Data | None = None) -> tuple[Experiment, list[dict[str, Any]]]:
    chosen = [*TINY, "evaluation.own=true", "evaluation.devices=false", "evaluation.every=2", "rounds=2", *settings]
    config = toml.apply_settings(load_recipe("digits"), [*chosen, "runtime.workers=1"])
    run = build_experiment(config, data=data)
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
    "settings", [["method=decouple"], ["local.name=scaffold"], ["local.name=feddyn"]], ids="-".join
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
