"""The loop: the same seed gives the same bytes, all methods see the same devices, and order does not matter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedhen import Family
from fedhen.algorithm.methods import FEDHEN
from fedhen.algorithm.rounds import Devices, Rules, Sent, play_rounds
from fedhen.algorithm.sampling import make_sampler
from fedhen.algorithm.updates import Reply
from fedhen.config.devices_settings import DevicesConfig
from fedhen.config.training_settings import ServerConfig
from fedhen.data.dataset import Data
from fedhen.experiment.build import build_experiment
from fedhen.experiment.runner import play_run
from fedhen.params import TierModels, Weights
from fedhen.privacy.mechanism import Mechanism
from support.families import came_back, two_exits
from support.noise import config, data, experiment, first, one_round


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_ones(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        list(play_run(tmp_path / name, experiment(seed=seed)))
    for file in (
        "rounds.jsonl",
        "models/server-complex.safetensors",
        "models/devices-simple.safetensors",
        "config.toml",
    ):
        a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert a == b
        assert a != c


def test_all_methods_see_the_same_devices() -> None:
    active = [[step.record["active"] for step in experiment(m).play()] for m in ("fedhen", "noside", "decouple")]
    assert active[0] == active[1] == active[2]


def test_all_methods_start_from_the_same_weights_and_simple_from_its_corner_of_complex() -> None:
    """w_s¹ = [w_c¹]_M."""
    fedhen, decouple = experiment("fedhen").server, experiment("decouple").server
    for name, tensor in decouple["complex"].items():
        assert torch.equal(tensor, fedhen["complex"][name])
    for name, tensor in decouple["simple"].items():
        assert torch.equal(tensor, fedhen["complex"][name])


def test_the_distance_is_zero_by_construction_only_if_weights_are_shared() -> None:
    for method, is_zero in (("fedhen", True), ("noside", True), ("decouple", False)):
        distances = [s.record["distance"]["simple"] for s in experiment(method).play() if "distance" in s.record]
        assert len(distances) == 2
        assert all((d == 0.0) == is_zero for d in distances)


class Reversed:
    """The same devices, trained in the opposite order."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        return self.devices.train(round_number, sent, list(active)[::-1])


def test_the_order_in_which_devices_train_does_not_matter() -> None:
    def play(reverse: bool) -> TierModels:
        run = experiment()
        devices = Reversed(run.engine.devices) if reverse else run.engine.devices
        rules = Rules(FEDHEN, make_sampler(run.config.devices, 0), Mechanism(ServerConfig()).begin)
        *_, last = play_rounds(run.server, run.memories, devices, rules, range(1, 4))
        return last.server

    forward, backward = play(False), play(True)
    assert all(torch.equal(forward["complex"][name], backward["complex"][name]) for name in forward["complex"])


def test_uniform_sampling_is_exact_and_fair() -> None:
    activate = make_sampler(DevicesConfig(number=100, active=10), seed=0)
    draws = [activate(t, {}) for t in range(1, 1001)]
    assert all(len(set(active)) == 10 and active == sorted(active) for active in draws)
    counts = np.bincount(np.concatenate(draws), minlength=100)
    assert abs(counts - 100).max() < 5 * math.sqrt(1000 * 0.1 * 0.9)
    assert activate(7, {}) == make_sampler(DevicesConfig(number=100, active=10), seed=0)(7, {})
    assert activate(7, {}) != make_sampler(DevicesConfig(number=100, active=10), seed=1)(7, {})


def test_bernoulli_sampling_varies_in_number() -> None:
    activate = make_sampler(DevicesConfig(number=100, active=10, sampling="bernoulli"), seed=0)
    numbers = [len(activate(t, {})) for t in range(1, 501)]
    assert abs(np.mean(numbers) - 10) < 5 * 3 / math.sqrt(500)
    assert abs(np.var(numbers) - 9) < 3


def test_a_round_without_devices_changes_nothing() -> None:
    run = experiment()
    (only,) = one_round(run, run.engine.devices, [], Rules(FEDHEN, run.activate, run.mechanism.begin))
    assert only.loss is None
    assert all(torch.equal(only.server["complex"][n], t) for n, t in run.server["complex"].items())


def test_a_record_holds_what_the_docs_promise(tmp_path: Path) -> None:
    """Bytes: simple holds body 6·5 + 5 and exit 5·3 + 3 = 53 doubles, complex 24 + 15 more, 8 bytes each."""
    run = experiment()
    list(play_run(tmp_path, run))
    records = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [r["round"] for r in records] == [1, 2, 3, 4]
    assert [set(r) for r in records] == [
        {"round", "active", "dropped", "loss", "bytes"} | ({"accuracy", "distance"} if n % 2 else set())
        for n in range(4)
    ]
    for record in records:
        simple = sum(d < 5 for d in record["active"])
        expected = {"simple": simple * 53 * 8, "complex": (4 - simple) * (53 + 24 + 15) * 8}
        assert record["bytes"] == {"down": expected, "up": expected}


def test_the_learning_rate_decays_from_round_to_round() -> None:
    """With decay 0.5 the third round's rate is a quarter: a run of rate 0.1 / 4 without decay trains device 0 alike."""
    decayed = experiment(training={"epochs": 1, "batch_size": 4, "lr": 0.1, "lr_decay": 0.5})
    quarter = experiment(training={"epochs": 1, "batch_size": 4, "lr": 0.025})
    a, b = (first(run, 3, [0]) for run in (decayed, quarter))
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


def test_the_last_round_is_always_evaluated() -> None:
    run = experiment(rounds=3)
    assert ["accuracy" in step.record for step in run.play()] == [False, True, True]


class Noisy(torch.nn.Module):
    """Drops half of its inputs, and counts its batches in a buffer that it does not save."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = two_exits().build("simple")
        self.register_buffer("count", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.count += self.training
        return list(self.inner(torch.nn.functional.dropout(x, 0.5, self.training) * (1 + self.count)))


def test_a_models_own_randomness_and_state_depend_on_round_and_device_alone() -> None:
    """Device 0 trains to the same bytes whatever was drawn or trained before; a device with its images differs."""
    one = replace(config(), tiers={"only": 1.0}, split=replace(config().split, kind="iid"))
    noisy = build_experiment(one, data=data(), family=Family({"only": Noisy}), accelerator="cpu")
    noisy.population.data.shards[1][:] = noisy.population.data.shards[0]

    def trained(number: int, active: list[int], device: int) -> Weights:
        torch.manual_seed(number + device)
        updates = {
            u.device: u.weights for u in came_back(noisy.engine.devices.train(number, Sent(noisy.server, {}), active))
        }
        return updates[device]

    once = trained(1, [0], 0)
    assert all(torch.equal(once[n], trained(1, [5, 1, 0], 0)[n]) for n in once)
    other_round, other_device = trained(2, [0], 0), trained(1, [1], 1)
    assert any(not torch.equal(once[n], other_round[n]) for n in once)
    assert any(not torch.equal(once[n], other_device[n]) for n in once)


def test_dropout_has_its_own_address() -> None:
    """With one image in one batch order cannot matter: two devices with the same image still drop different inputs."""
    x, y = torch.ones(2, 6, dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    shards = (np.array([0]), np.array([0]))
    one = replace(config(), tiers={"only": 1.0}, devices=DevicesConfig(number=2, active=2))
    noisy = build_experiment(one, data=Data(x, y, x, y, 3, shards), family=Family({"only": Noisy}), accelerator="cpu")
    results = [
        u.weights for t in (1, 2) for u in came_back(noisy.engine.devices.train(t, Sent(noisy.server, {}), [0, 1]))
    ]
    assert len({tuple(w["inner.body.weight"].flatten().tolist()) for w in results}) == 4


class Poisoned:
    """The same devices, one of which sends a single bad number."""

    def __init__(self, devices: Devices, victim: int, bad: float) -> None:
        self.devices, self.victim, self.bad = devices, victim, bad

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        for update in came_back(self.devices.train(round_number, sent, active)):
            if update.device == self.victim:
                update.weights["body.bias"][0] = self.bad
            yield update


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_drops_its_device(bad: float) -> None:
    run = experiment()
    devices = Poisoned(run.engine.devices, 3, bad)
    (done,) = one_round(run, devices, [0, 3, 6], Rules(FEDHEN, run.activate, run.mechanism.begin))
    (without,) = one_round(run, run.engine.devices, [0, 6], Rules(FEDHEN, run.activate, run.mechanism.begin))
    assert done.dropped == [3] and [u.device for u in done.updates] == [0, 6]
    assert all(torch.equal(done.server["complex"][n], t) for n, t in without.server["complex"].items())


def test_a_loss_that_is_not_finite_is_recorded_as_none() -> None:
    """The weights may be finite all the same, as where a model masks a class with −∞."""
    run = experiment()
    (done,) = one_round(run, run.engine.devices, [0], Rules(FEDHEN, run.activate, run.mechanism.begin))
    assert replace(done, losses={0: math.inf}).loss is None
