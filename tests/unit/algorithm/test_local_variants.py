"""FedProx, SCAFFOLD and FedDyn on quadratics, whose optimum a linear solve gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedhen import Family, Method
from fedhen.algorithm.local_training import LocalProblem, train_locally
from fedhen.algorithm.local_variants import Correction, LocalContext, feddyn, fedprox, scaffold
from fedhen.algorithm.merging import Memories, keep_tiers_apart, share_common_weights
from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Update
from fedhen.config import validation
from fedhen.config.training_settings import TrainingConfig
from fedhen.data.dataset import Data
from fedhen.experiment.build import build_experiment
from fedhen.experiment.experiment import Experiment
from support.families import came_back
from support.marks import first_is_quick

LR = 0.1
SIZES = [2, 5, 3, 6, 4, 4]
CURVATURES = np.array([[1.0, 3.0], [2.0, 0.5], [4.0, 1.0], [0.5, 2.0], [3.0, 3.0], [1.0, 1.0]])
CENTRES = np.array([[2.0, -1.0], [-3.0, 4.0], [1.0, 1.0], [5.0, -2.0], [0.0, 3.0], [-1.0, -4.0]])


class Quadratic(nn.Module):
    """Exits √k·(a − c), and √k·(a + b − c) for the deep tier, for inputs (√k, c): half their squares are quadratics."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(2, dtype=torch.float64)) if deep else None

    def forward(self, x: Tensor) -> list[Tensor]:
        root, centre = x[:, :2], x[:, 2:]
        exits = [root * (self.a - centre)]
        return exits if self.b is None else [*exits, root * (self.a + self.b - centre)]


FAMILY = Family({"simple": lambda: Quadratic(False), "complex": lambda: Quadratic(True)})


def half_squares_of_all(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    return torch.stack([z.square().sum(1).mean() / 2 for z in logits]).sum()


def half_squares_of_last(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    return logits[-1].square().sum(1).mean() / 2


SIDE = Method("side", half_squares_of_all, share_common_weights)
LAST = Method("last", half_squares_of_last, share_common_weights)
APART = Method("apart", half_squares_of_last, keep_tiers_apart)


def federation(sizes: Sequence[int] = SIZES) -> Data:
    rows = [np.concatenate([np.sqrt(k), c]) for k, c in zip(CURVATURES, CENTRES, strict=True)]
    x = torch.from_numpy(np.repeat(rows, sizes, axis=0))
    y = torch.arange(len(x)) % 2
    ends = np.cumsum(sizes)
    return Data(x, y, x, y, 2, tuple(np.arange(e - n, e) for e, n in zip(ends, sizes, strict=True)))


def run(
    method: Method, local: dict[str, Any], tiers: dict[str, float], sizes: Sequence[int] = SIZES, **more: Any
) -> Experiment:
    """All devices active, whole shards as batches, no decay and no clip that bites."""
    settings = {
        "method": method.name,
        "rounds": 150,
        "devices": {"number": 6, "active": 6},
        "tiers": tiers,
        "model": {"family": "python"},
        "training": {"epochs": 4, "batch_size": 100, "lr": LR, "weight_decay": 0.0, "clip": 1e9},
        "local": local,
        "evaluation": {"every": 150},
        **more,
    }
    config = validation.from_mapping(settings)
    experiment = build_experiment(config, data=federation(sizes), family=FAMILY, method=method, accelerator="cpu")
    for _ in experiment.play():
        pass
    return experiment


def optimum(
    exits: Callable[[int], Sequence[tuple[int, int]]], unknowns: int, sizes: Sequence[int]
) -> np.ndarray[Any, Any]:
    """argmin of Σ_i n_i Σ_exits k/2·(p·w − c)² for each coordinate; p says which unknowns an exit adds up."""
    found = []
    for coordinate in range(2):
        matrix, vector = np.zeros((unknowns, unknowns)), np.zeros(unknowns)
        for device, n in enumerate(sizes):
            k, c = CURVATURES[device, coordinate], CENTRES[device, coordinate]
            for pattern in exits(device):
                p = np.array(pattern[:unknowns], dtype=float)
                matrix += n * k * np.outer(p, p)
                vector += n * k * c * p
        found.append(np.linalg.solve(matrix, vector))
    return np.array(found).T


ONE_TIER = {"simple": 1.0}
TWO_TIERS = {"simple": 0.5, "complex": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SIZES, [4] * 6], ids=["unequal", "equal"])
@pytest.mark.parametrize("local", [{"name": "scaffold"}, {"name": "feddyn", "alpha": 0.3}], ids=lambda c: c["name"])
def test_one_tier_reaches_the_optimum_of_the_sample_weighted_sum(local: dict[str, Any], sizes: list[int]) -> None:
    """w* = Σ n k c / Σ n k in each coordinate."""
    expected = (np.array(sizes)[:, None] * CURVATURES * CENTRES).sum(0) / (np.array(sizes)[:, None] * CURVATURES).sum(0)
    found = run(APART, local, ONE_TIER, sizes).server["simple"]["a"].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_fedavg_does_not_reach_that_optimum() -> None:
    """Its fixed point with 4 local steps is that of other weights, Σ (1 − (1 − lr·k)⁴)·(c − w) = 0, not the optimum."""
    found = run(APART, {"name": "plain"}, ONE_TIER).server["simple"]["a"].numpy()
    pulled = 1 - (1 - LR * CURVATURES) ** 4
    np.testing.assert_allclose(found, (pulled * CENTRES).sum(0) / pulled.sum(0), atol=1e-9)
    optimal = (np.array(SIZES)[:, None] * CURVATURES * CENTRES).sum(0) / (np.array(SIZES)[:, None] * CURVATURES).sum(0)
    assert np.abs(found - optimal).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("local", [{"name": "scaffold"}, {"name": "feddyn", "alpha": 0.3}], ids=lambda c: c["name"])
def test_two_tiers_that_share_reach_the_optimum_over_the_holders(local: dict[str, Any]) -> None:
    """Side objective: devices 0-2 have exit a, devices 3-5 exits a and a + b; both solve the normal equations."""
    expected = optimum(lambda device: [(1, 0)] if device < 3 else [(1, 0), (1, 1)], 2, SIZES)
    server = run(SIDE, local, TWO_TIERS).server["complex"]
    np.testing.assert_allclose([server["a"].numpy(), server["b"].numpy()], expected, atol=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("local", [{"name": "scaffold"}, {"name": "feddyn", "alpha": 0.3}], ids=lambda c: c["name"])
def test_two_tiers_kept_apart_reach_two_optima(local: dict[str, Any]) -> None:
    """The simple model's is over devices 0-2 alone, the complex model's a + b over devices 3-5."""
    server = run(APART, local, TWO_TIERS).server
    weights = np.array(SIZES)[:, None] * CURVATURES
    simple = (weights * CENTRES)[:3].sum(0) / weights[:3].sum(0)
    together = (weights * CENTRES)[3:].sum(0) / weights[3:].sum(0)
    np.testing.assert_allclose(server["simple"]["a"].numpy(), simple, atol=1e-4)
    np.testing.assert_allclose((server["complex"]["a"] + server["complex"]["b"]).numpy(), together, atol=1e-4)


@pytest.mark.slow
def test_partial_participation_reaches_the_optimum() -> None:
    """Two of six a round: SCAFFOLD's c and FedDyn's mean run over all devices, active or not."""
    expected = (CURVATURES * CENTRES).sum(0) / CURVATURES.sum(0)
    for local in ({"name": "scaffold"}, {"name": "feddyn", "alpha": 1.0}):
        found = run(APART, local, ONE_TIER, [4] * 6, devices={"number": 6, "active": 2}).server["simple"]["a"].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-2)


def test_fedprox_pulls_towards_the_server() -> None:
    """Many local steps end where k·(w − c) + μ·(w − w_server) = 0: from w_server = 0 at w = k·c / (k + μ)."""
    training = {"epochs": 80, "batch_size": 100, "lr": 0.15, "weight_decay": 0.0, "clip": 1e9}
    more: dict[str, Any] = {"training": training, "rounds": 1, "evaluation": {"every": 1}}
    experiment = run(APART, {"name": "fedprox", "mu": 2.0}, ONE_TIER, **more)
    for device, row in experiment.last_models.rows.items():
        expected = CURVATURES[device] * CENTRES[device] / (CURVATURES[device] + 2.0)
        np.testing.assert_allclose(row["a"].numpy(), expected, atol=1e-9)


def test_the_correction_is_inside_the_clip_and_the_decay_outside() -> None:
    """From w = 3 with f = k/2·(w − c)², k = 4, c = 1: g = 8. Offset 5 and pull 0.5·3 make 14.5, cut to the clip of 2.

    Then decay 0.1 + 0.2 times w is added, outside the clip: w ← 3 − 0.5·(2 + 0.9).
    """
    module = Quadratic(False)
    module.a.data = torch.tensor([3.0, 0.0], dtype=torch.float64)
    batch = torch.tensor([[2.0, 0.0, 1.0, 0.0]], dtype=torch.float64), torch.tensor([0])
    correction = Correction({"a": torch.tensor([5.0, 0.0], dtype=torch.float64)}, pull=0.5, decay=0.2)
    problem = LocalProblem(
        half_squares_of_last, TrainingConfig(clip=2.0, weight_decay=0.1), lr=0.5, correction=correction
    )
    train_locally(module, [batch], problem)
    assert module.a[0].item() == pytest.approx(3 - 0.5 * (2 + 0.3 * 3), rel=1e-6)


def test_the_variants_corrections_by_hand() -> None:
    """w_server = 2, memory 0.5, mean 3, ω = 2, μ = 0.1, α = 0.4."""
    weights = ({"w": torch.tensor([2.0])}, {"w": torch.tensor([0.5])}, {"w": torch.tensor([3.0])})
    context = LocalContext(*weights, omega=2.0)
    prox, scaf, dyn = fedprox(0.1), scaffold(), feddyn(0.4)
    assert prox.correction(context).offset["w"].item() == pytest.approx(-0.2) and prox.correction(context).pull == 0.1
    assert scaf.correction(context).offset["w"].item() == pytest.approx(3 / 2 - 0.5)
    assert dyn.correction(context).offset["w"].item() == pytest.approx(0.2 * (0.5 - 2))
    assert dyn.correction(context).decay == pytest.approx(0.2)
    trained = {"w": torch.tensor([1.0])}
    assert scaf.remember is not None and dyn.remember is not None
    assert scaf.remember(context, trained, 0.25)["w"].item() == pytest.approx(0.5 - 3 + (2 - 1) / 0.25)
    assert dyn.remember(context, trained, 0.25)["w"].item() == pytest.approx(0.5 + (1 - 2))
    assert (scaf.memory_weight(2.0), dyn.memory_weight(2.0)) == (2.0, 1.0)


def test_the_mean_of_the_memories_is_over_all_holders_of_each_element() -> None:
    """4 devices hold the first of two elements, 2 hold both. One of each changes by 6 and by (12, 12).

    First element: (6 + 12) / 6 holders; second: 12 / 2. SCAFFOLD weighs by ω = ½ and 1: (3 + 12) / 6 and 12 / 2.
    """
    zeros = torch.zeros(2)
    before = Memories({"half": {"w": zeros[:1]}, "full": {"w": zeros}}, {"half": 4, "full": 2})
    updates = [
        Update(0, "half", {}, frozenset(), 1, 0.0, memory_change={"w": torch.tensor([6.0])}, omega=0.5),
        Update(5, "full", {}, frozenset(), 1, 0.0, memory_change={"w": torch.tensor([12.0, 12.0])}),
    ]
    for local, expected in ((feddyn(0.1), [3.0, 6.0]), (scaffold(), [2.5, 6.0])):
        after = before.update(updates, share_common_weights, local).mean
        assert after["full"]["w"].tolist() == expected and after["half"]["w"].tolist() == expected[:1]
    apart = before.update(updates, keep_tiers_apart, feddyn(0.1)).mean
    assert apart["half"]["w"].tolist() == [1.5] and apart["full"]["w"].tolist() == [6.0, 6.0]


def test_a_weight_that_is_held_and_not_trained_is_not_remembered() -> None:
    """Complex devices that read only a + b train both; a family's buffers and unread exits take no part."""
    experiment = run(LAST, {"name": "scaffold"}, TWO_TIERS, rounds=2, evaluation={"every": 2})
    assert experiment.memories.mean["complex"].keys() == {"a", "b"}
    assert any(float(t.abs().sum()) > 0 for t in experiment.memories.mean["complex"].values()), "the state moves on"
    counted = Family({"simple": Counting}, average_buffers=True)
    config = validation.from_mapping(
        {
            "tiers": {"simple": 1.0},
            "rounds": 2,
            "devices": {"number": 6, "active": 6},
            "model": {"family": "python"},
            "local": {"name": "feddyn"},
        }
    )
    held = build_experiment(config, data=federation(), family=counted, method=APART, accelerator="cpu")
    assert "seen" in held.server["simple"] and held.memories.mean["simple"].keys() == {"a"}


class Counting(Quadratic):
    """With a buffer that it saves."""

    def __init__(self) -> None:
        super().__init__(False)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))


@pytest.mark.slow
def test_memory_covers_the_trained_weights_and_bytes_count_what_is_sent() -> None:
    """Doubles of 8 bytes: a simple device holds 2, a complex one 4; SCAFFOLD sends as much again each way."""
    for local, factor in (("plain", 1), ("fedprox", 1), ("scaffold", 2), ("feddyn", 1)):
        experiment = run(SIDE, {"name": local}, TWO_TIERS, rounds=1, evaluation={"every": 1})
        experiment.population = replace(experiment.population, config=replace(experiment.config, rounds=2))
        step = next(iter(experiment.play()))
        expected = {"simple": 3 * 2 * 8 * factor, "complex": 3 * 4 * 8 * factor}
        assert step.record["bytes"] == {"down": expected, "up": expected}
    memory = experiment.engine.devices.memory  # type: ignore[attr-defined]
    assert memory[0].keys() == {"a"} and memory[5].keys() == {"a", "b"}


def test_a_dropped_devices_memory_stays() -> None:
    experiment = run(APART, {"name": "scaffold"}, ONE_TIER, rounds=1, evaluation={"every": 1})
    memory = experiment.engine.devices.memory  # type: ignore[attr-defined]
    before = {device: weights["a"].clone() for device, weights in memory.items()}
    experiment.population.data.x[experiment.population.data.shards[2]] = torch.nan
    sent = Sent(experiment.server, experiment.memories.mean)
    updates = {update.device: update for update in came_back(experiment.engine.devices.train(2, sent, [1, 2]))}
    assert updates[2].memory_change == {} and torch.equal(memory[2]["a"], before[2])
    assert not torch.equal(memory[1]["a"], before[1])


def test_a_dropped_device_keeps_the_state_of_its_optimiser() -> None:
    training = {"epochs": 4, "batch_size": 100, "lr": 0.05, "optimizer": "adam", "optimizer_state": "device"}
    more: dict[str, Any] = {"rounds": 1, "evaluation": {"every": 1}, "training": training}
    experiment = run(APART, {"name": "feddyn"}, ONE_TIER, **more)
    memory = experiment.engine.devices.memory  # type: ignore[attr-defined]
    before = {device: {key: tensor.clone() for key, tensor in kept.items()} for device, kept in memory.items()}
    assert before[1].keys() == {"a", "mean/a", "square/a", "steps/a"} and before[1]["steps/a"] == 4
    experiment.population.data.x[experiment.population.data.shards[2]] = torch.nan
    sent = Sent(experiment.server, experiment.memories.mean)
    updates = {update.device: update for update in came_back(experiment.engine.devices.train(2, sent, [1, 2]))}
    assert all(torch.equal(memory[2][key], tensor) for key, tensor in before[2].items())
    assert memory[1]["steps/a"] == 8 and not torch.equal(memory[1]["mean/a"], before[1]["mean/a"])
    assert updates[1].memory_change.keys() == {"a"}, "only the local variant's memory goes to the server"


@pytest.mark.parametrize(
    ("optimizer", "local"),
    first_is_quick(product(["adam", "adamw"], [{"name": "fedprox", "mu": 2.0}, {"name": "feddyn", "alpha": 2.0}])),
    ids=str,
)
def test_adam_finds_the_minimum_of_the_corrected_objective(optimizer: str, local: dict[str, Any]) -> None:
    """In the first round, from w_server = 0 and h = 0, both variants minimise k/2·(w − c)² + 2/2·w²: w = k·c / (k + 2).

    A decay that AdamW applied apart from the gradient would end elsewhere.
    """
    training = {"epochs": 200, "batch_size": 100, "lr": 0.3, "weight_decay": 0.0, "clip": 1e9, "optimizer": optimizer}
    more: dict[str, Any] = {"training": training, "rounds": 1, "evaluation": {"every": 1}}
    for device, row in run(APART, local, ONE_TIER, [4] * 6, **more).last_models.rows.items():
        expected = CURVATURES[device] * CENTRES[device] / (CURVATURES[device] + 2.0)
        np.testing.assert_allclose(row["a"].numpy(), expected, atol=1e-3)


def test_omega_is_the_share_of_the_pools_data() -> None:
    """Apart: n_i · 3 / (2 + 5 + 3) for the simple devices; together: n_i · 6 / 24."""
    apart = run(APART, {"name": "plain"}, TWO_TIERS, rounds=1, evaluation={"every": 1})
    together = run(SIDE, {"name": "plain"}, TWO_TIERS, rounds=1, evaluation={"every": 1})
    assert apart.population.omega[:3] == pytest.approx([0.6, 1.5, 0.9])
    assert together.population.omega == pytest.approx([n / 4 for n in SIZES])
