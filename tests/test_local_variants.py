"""FedProx, SCAFFOLD and FedDyn on quadratics, whose optimum a linear solve gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedhen import Family, Method, schema
from fedhen.algorithm.merging import keep_tiers_apart, share_common_weights
from fedhen.assembly import assemble
from fedhen.data.dataset import Data
from fedhen.experiment import Experiment
from fedhen.rounds import Sent

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
        "rounds": 300,
        "devices": {"number": 6, "active": 6},
        "tiers": tiers,
        "model": {"family": "python"},
        "training": {"epochs": 4, "batch_size": 100, "lr": 0.05, "weight_decay": 0.0, "clip": 1e9},
        "local": local,
        "evaluation": {"every": 300},
        **more,
    }
    config = schema.from_mapping(settings)
    experiment = assemble(config, data=federation(sizes), family=FAMILY, method=method, accelerator="cpu")
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


@pytest.mark.parametrize("sizes", [SIZES, [4] * 6], ids=["unequal", "equal"])
@pytest.mark.parametrize("local", [{"name": "scaffold"}, {"name": "feddyn", "alpha": 0.3}], ids=lambda c: c["name"])
def test_one_tier_reaches_the_optimum_of_the_sample_weighted_sum(local: dict[str, Any], sizes: list[int]) -> None:
    """w* = Σ n k c / Σ n k in each coordinate."""
    expected = (np.array(sizes)[:, None] * CURVATURES * CENTRES).sum(0) / (np.array(sizes)[:, None] * CURVATURES).sum(0)
    found = run(APART, local, ONE_TIER, sizes).server["simple"]["a"].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_fedavg_does_not() -> None:
    """Its fixed point with 4 local steps is that of other weights, Σ (1 − (1 − lr·k)⁴)·(c − w) = 0, not the optimum."""
    found = run(APART, {"name": "plain"}, ONE_TIER).server["simple"]["a"].numpy()
    pulled = 1 - (1 - 0.05 * CURVATURES) ** 4
    np.testing.assert_allclose(found, (pulled * CENTRES).sum(0) / pulled.sum(0), atol=1e-9)
    optimal = (np.array(SIZES)[:, None] * CURVATURES * CENTRES).sum(0) / (np.array(SIZES)[:, None] * CURVATURES).sum(0)
    assert np.abs(found - optimal).max() > 0.1


@pytest.mark.parametrize("local", [{"name": "scaffold"}, {"name": "feddyn", "alpha": 0.3}], ids=lambda c: c["name"])
def test_two_tiers_that_share_reach_the_optimum_over_the_holders(local: dict[str, Any]) -> None:
    """Side objective: devices 0-2 have exit a, devices 3-5 exits a and a + b; both solve the normal equations."""
    expected = optimum(lambda device: [(1, 0)] if device < 3 else [(1, 0), (1, 1)], 2, SIZES)
    server = run(SIDE, local, TWO_TIERS, rounds=700, evaluation={"every": 700}).server["complex"]
    np.testing.assert_allclose([server["a"].numpy(), server["b"].numpy()], expected, atol=5e-3)


@pytest.mark.parametrize("local", [{"name": "scaffold"}, {"name": "feddyn", "alpha": 0.3}], ids=lambda c: c["name"])
def test_two_tiers_kept_apart_reach_two_optima(local: dict[str, Any]) -> None:
    """The simple model's is over devices 0-2 alone, the complex model's a + b over devices 3-5."""
    server = run(APART, local, TWO_TIERS).server
    weights = np.array(SIZES)[:, None] * CURVATURES
    simple = (weights * CENTRES)[:3].sum(0) / weights[:3].sum(0)
    together = (weights * CENTRES)[3:].sum(0) / weights[3:].sum(0)
    np.testing.assert_allclose(server["simple"]["a"].numpy(), simple, atol=1e-4)
    np.testing.assert_allclose((server["complex"]["a"] + server["complex"]["b"]).numpy(), together, atol=1e-4)


def test_partial_participation_reaches_it_too() -> None:
    """Two of six a round: SCAFFOLD's c and FedDyn's mean run over all devices, active or not."""
    expected = (CURVATURES * CENTRES).sum(0) / CURVATURES.sum(0)
    for local in ({"name": "scaffold"}, {"name": "feddyn", "alpha": 1.0}):
        more: dict[str, Any] = {"devices": {"number": 6, "active": 2}, "rounds": 500, "evaluation": {"every": 500}}
        found = run(APART, local, ONE_TIER, [4] * 6, **more).server["simple"]["a"].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-2)


def test_fedprox_pulls_towards_the_server() -> None:
    """Many local steps end where k·(w − c) + μ·(w − w_server) = 0: from w_server = 0 at w = k·c / (k + μ)."""
    training = {"epochs": 500, "batch_size": 100, "lr": 0.05, "weight_decay": 0.0, "clip": 1e9}
    more: dict[str, Any] = {"training": training, "rounds": 1, "evaluation": {"every": 1}}
    experiment = run(APART, {"name": "fedprox", "mu": 2.0}, ONE_TIER, **more)
    for device, row in experiment.last_models.rows.items():
        expected = CURVATURES[device] * CENTRES[device] / (CURVATURES[device] + 2.0)
        np.testing.assert_allclose(row["a"].numpy(), expected, atol=1e-9)


def test_the_correction_is_inside_the_clip_and_feddyns_decay_outside() -> None:
    """One step of device 0 from w = 0, clip 0.1: |g| = 0.1 after the clip for all; FedDyn's α·w decay is 0 at w = 0."""
    for local in ({"name": "fedprox", "mu": 2.0}, {"name": "feddyn", "alpha": 0.3}, {"name": "scaffold"}):
        training = {"epochs": 1, "batch_size": 100, "lr": 1.0, "weight_decay": 0.0, "clip": 0.1}
        experiment = run(APART, local, ONE_TIER, training=training, rounds=1, evaluation={"every": 1})
        assert np.linalg.norm(experiment.last_models.rows[0]["a"].numpy()) == pytest.approx(0.1, rel=1e-4)


def test_memory_covers_the_trained_weights_and_bytes_count_what_is_sent() -> None:
    """Doubles of 8 bytes: a simple device holds 2, a complex one 4; SCAFFOLD sends as much again each way."""
    for local, factor in (("plain", 1), ("fedprox", 1), ("scaffold", 2), ("feddyn", 1)):
        experiment = run(SIDE, {"name": local}, TWO_TIERS, rounds=1, evaluation={"every": 1})
        step = next(iter(experiment.play()))
        expected = {"simple": 3 * 2 * 8 * factor, "complex": 3 * 4 * 8 * factor}
        assert step.record["bytes"] == {"down": expected, "up": expected}
    memory = experiment.devices.memory  # type: ignore[attr-defined]
    assert memory[0].keys() == {"a"} and memory[5].keys() == {"a", "b"}


def test_a_dropped_devices_memory_stays() -> None:
    experiment = run(APART, {"name": "scaffold"}, ONE_TIER, rounds=1, evaluation={"every": 1})
    memory = experiment.devices.memory  # type: ignore[attr-defined]
    before = {device: weights["a"].clone() for device, weights in memory.items()}
    experiment.data.x[experiment.data.shards[2]] = torch.nan
    sent = Sent(experiment.server, experiment.memories.mean)
    updates = {update.device: update for update in experiment.devices.train(2, sent, [1, 2])}
    assert updates[2].remembered == {} and torch.equal(memory[2]["a"], before[2])
    assert not torch.equal(memory[1]["a"], before[1])


def test_omega_is_the_share_of_the_pools_data() -> None:
    """Apart: n_i · 3 / (2 + 5 + 3) for the simple devices; together: n_i · 6 / 24."""
    apart = run(APART, {"name": "plain"}, TWO_TIERS, rounds=1, evaluation={"every": 1})
    together = run(SIDE, {"name": "plain"}, TWO_TIERS, rounds=1, evaluation={"every": 1})
    assert apart.devices.fleet.omega[:3] == pytest.approx([0.6, 1.5, 0.9])  # type: ignore[attr-defined]
    assert together.devices.fleet.omega == pytest.approx([n / 4 for n in SIZES])  # type: ignore[attr-defined]
