"""Personal models on a few numbers and two tiers, with every update worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedhen import Family, Method
from fedhen.algorithm.merging import share_common_weights
from fedhen.config import validation
from fedhen.data.dataset import Data
from fedhen.engines.personal_models import PersonalModels
from fedhen.engines.sequential import SequentialDevices
from fedhen.experiment.build import build_experiment, start_experiment
from fedhen.experiment.experiment import Experiment

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
    """v ← v − ηλ·(v − w) with ηλ = 1 is w, wherever v was, and w is not 0."""
    run = start({"name": "ditto", "pull": 1 / LR}, federation(scale=0.0))
    begin = {"a": torch.full((2,), 3.0, dtype=torch.float64), "b": torch.full((2,), -2.0, dtype=torch.float64)}
    run = start_experiment(replace(run.population, family=FAMILY.start_from(begin)))
    run.memory[3] = {"copy/a": torch.ones(2, dtype=torch.float64), "copy/b": -torch.ones(2, dtype=torch.float64)}
    play(run)
    check(run.server["complex"]["a"], 3.0)
    check(run.memory[3]["copy/a"], 3.0)
    check(run.memory[3]["copy/b"], -2.0)


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


ALPHA, BETA, PULL = 0.05, 0.03, 0.2
Numbers = dict[str, float]


def through_inner_step(device: int, weights: Mapping[str, float]) -> float:
    """MAML's gradient: (1 − α·m·k)·k·(s̃ − c), for each of the m weights that add up to s."""
    number, total, k = len(weights), sum(weights.values()), CURVATURES[device]
    inner = total - ALPHA * number * slope(device, total)
    return float((1 - ALPHA * number * k) * slope(device, inner))


def average(found: Mapping[int, Numbers]) -> Numbers:
    """The mean of each weight over the devices that have it."""
    holders = {"a": SIMPLE + COMPLEX, "b": COMPLEX}
    return {name: sum(found[d][name] for d in devices) / len(devices) for name, devices in holders.items()}


def scaffold_by_hand(rounds: int) -> tuple[Numbers, dict[int, Numbers]]:
    """Two outer steps of β with + c − c_i, then c_i ← c_i − c + (w_server − w_i)/(2β)."""
    server, c = {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}
    own = {d: dict.fromkeys("ab" if d in COMPLEX else "a", 0.0) for d in range(6)}
    for _ in range(rounds):
        trained = {}
        for d, memory in own.items():
            w = {name: server[name] for name in memory}
            for _ in range(2):
                g = through_inner_step(d, w)
                w = {n: w[n] - BETA * (g + c[n] - memory[n]) for n in w}
            own[d] = {n: memory[n] - c[n] + (server[n] - w[n]) / (2 * BETA) for n in w}
            trained[d] = w
        server, c = average(trained), average(own)
    return server, own


def feddyn_by_hand(rounds: int) -> tuple[Numbers, dict[int, Numbers]]:
    """Two outer steps of β on the gradient + α_dyn·(h_i − w_cld + w), then h_i += w_i − w_cld; w_cld = w + mean h."""
    server, mean = {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}
    own = {d: dict.fromkeys("ab" if d in COMPLEX else "a", 0.0) for d in range(6)}
    for _ in range(rounds):
        trained, cloud = {}, {n: server[n] + mean[n] for n in server}
        for d, memory in own.items():
            w = {name: cloud[name] for name in memory}
            for _ in range(2):
                g = through_inner_step(d, w)
                w = {n: w[n] - BETA * (g + PULL * (memory[n] - cloud[n] + w[n])) for n in w}
            own[d] = {n: memory[n] + w[n] - cloud[n] for n in w}
            trained[d] = w
        server, mean = average(trained), average(own)
    return server, own


@pytest.mark.parametrize(
    ("local", "by_hand"),
    [({"name": "scaffold"}, scaffold_by_hand), ({"name": "feddyn", "alpha": PULL}, feddyn_by_hand)],
)
def test_maml_under_scaffold_and_feddyn_by_hand(
    local: dict[str, Any], by_hand: Callable[[int], tuple[Numbers, dict[int, Numbers]]]
) -> None:
    """PFLScaf and PFLDyn (Acar et al. 2021) on two tiers: four batches a round are two outer steps."""
    training = {"epochs": 4, "batch_size": 100, "lr": LR, "weight_decay": 0.0, "clip": 1e9}
    personal = {"name": "perfedavg", "order": "full", "alpha": ALPHA, "beta": BETA}
    run = play(start(personal, training=training, local=local, rounds=3))
    server, own = by_hand(3)
    for name, expected in server.items():
        np.testing.assert_allclose(run.server["complex"][name].numpy(), [expected] * 2, rtol=1e-9)
    for device, memory in own.items():
        for name, expected in memory.items():
            np.testing.assert_allclose(run.memory[device][name].numpy(), [expected] * 2, rtol=1e-9)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_local_variant_leaves_the_personal_part_alone(optimizer: str) -> None:
    """FedDyn pulls a, which is shared, to 0; b, which is not, has the weight decay alone: a and b part ways.

    In the first step of the first round a = b = w, so that only the decays differ.
    """
    decay = 0.3
    training = {"epochs": 1, "batch_size": 100, "lr": LR, "weight_decay": decay, "clip": 1e9, "optimizer": optimizer}
    local = {"name": "feddyn", "alpha": PULL}
    run = start({"name": "fedper", "part": ["b"]}, federation(scale=0.0), training=training, local=local, rounds=1)
    begin = {name: torch.full((2,), 2.0, dtype=torch.float64) for name in "ab"}
    run = play(start_experiment(replace(run.population, family=FAMILY.start_from(begin))))
    check(run.memory[3]["personal/b"], 2.0 * (1 - LR * decay))
