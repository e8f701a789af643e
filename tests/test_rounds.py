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

from families import two_exits
from fedhen import config as configuration
from fedhen.algorithm.merging import Server, Update
from fedhen.algorithm.methods import FEDHEN
from fedhen.config import Config, DevicesConfig, ServerConfig
from fedhen.data.dataset import Data
from fedhen.experiment import Experiment, assemble, play_into
from fedhen.params import Weights
from fedhen.rounds import rounds, sampling
from fedhen.runtimes.plain import PlainDevices


def data() -> Data:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(120, 6))), torch.from_numpy(rng.integers(0, 3, 120))
    return Data(x[:80], y[:80], x[80:], y[80:], 3)


def config(method: str = "fedhen", **settings: object) -> Config:
    base = {
        "method": method,
        "rounds": 4,
        "devices": {"number": 10, "active": 4},
        "model": {"family": "python"},
        "training": {"epochs": 1, "batch_size": 4},
        "evaluation": {"every": 2},
    }
    return configuration.from_mapping({**base, **settings})


def experiment(method: str = "fedhen", **settings: object) -> Experiment:
    return assemble(config(method, **settings), data=data(), family=two_exits(), accelerator="cpu")


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_ones(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        list(play_into(tmp_path / name, experiment(seed=seed)))
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


def test_the_distance_is_zero_by_construction_only_where_weights_are_shared() -> None:
    for method, is_zero in (("fedhen", True), ("noside", True), ("decouple", False)):
        distances = [s.record["distance"]["simple"] for s in experiment(method).play() if "distance" in s.record]
        assert len(distances) == 2
        assert all((d == 0.0) == is_zero for d in distances)


class Reversed:
    """The same devices, trained in the opposite order."""

    def __init__(self, devices: PlainDevices) -> None:
        self.devices = devices

    def train(self, round_number: int, server: Server, active: Sequence[int]) -> Iterator[Update]:
        return self.devices.train(round_number, server, list(active)[::-1])


def test_the_order_in_which_devices_train_does_not_matter() -> None:
    def play(reverse: bool) -> Server:
        run = experiment()
        devices = Reversed(run.devices) if reverse else run.devices
        activate = sampling(run.config.devices, 0)
        *_, last = rounds(run.server, FEDHEN, devices, activate, rule=ServerConfig(), numbers=range(1, 4))
        return last.server

    forward, backward = play(False), play(True)
    assert all(torch.equal(forward["complex"][name], backward["complex"][name]) for name in forward["complex"])


def test_uniform_sampling_is_exact_and_fair() -> None:
    activate = sampling(DevicesConfig(number=100, active=10), seed=0)
    draws = [activate(t) for t in range(1, 1001)]
    assert all(len(set(active)) == 10 and active == sorted(active) for active in draws)
    counts = np.bincount(np.concatenate(draws), minlength=100)
    assert abs(counts - 100).max() < 5 * math.sqrt(1000 * 0.1 * 0.9)
    assert activate(7) == sampling(DevicesConfig(number=100, active=10), seed=0)(7)
    assert activate(7) != sampling(DevicesConfig(number=100, active=10), seed=1)(7)


def test_bernoulli_sampling_varies_in_number() -> None:
    activate = sampling(DevicesConfig(number=100, active=10, sampling="bernoulli"), seed=0)
    numbers = [len(activate(t)) for t in range(1, 501)]
    assert abs(np.mean(numbers) - 10) < 5 * 3 / math.sqrt(500)
    assert abs(np.var(numbers) - 9) < 3


def test_a_round_without_devices_changes_nothing() -> None:
    run = experiment()
    (only,) = rounds(run.server, FEDHEN, run.devices, lambda _: [], rule=ServerConfig(), numbers=[1])
    assert only.loss is None
    assert all(torch.equal(only.server["complex"][n], t) for n, t in run.server["complex"].items())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_device_with_a_weight_that_is_no_number_is_left_out_of_that_round(bad: float) -> None:
    """Its data makes every gradient bad. The result is as if it had not been active, and its old row stays."""
    poisoned = data()
    run = assemble(config(), data=poisoned, family=two_exits(), accelerator="cpu")
    victim = 3
    shard = run.data.shards[victim]
    run.data.x[shard] = bad
    without, with_it = (
        next(rounds(run.server, FEDHEN, run.devices, lambda _, a=active: a, rule=ServerConfig(), numbers=[1]))  # type: ignore[misc]
        for active in ([0, 6], [0, victim, 6])
    )
    assert with_it.dropped == [victim] and without.dropped == []
    assert [u.device for u in with_it.updates] == [0, 6]
    assert with_it.loss == without.loss
    for name, tensor in without.server["complex"].items():
        assert torch.equal(with_it.server["complex"][name], tensor)


def test_a_record_holds_what_the_docs_promise(tmp_path: Path) -> None:
    """Bytes: simple holds body 6·5 + 5 and exit 5·3 + 3 = 53 doubles, complex 24 + 15 more, 8 bytes each."""
    run = experiment()
    list(play_into(tmp_path, run))
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
    a, b = (run.devices.train_one(3, 0, run.server["simple"]) for run in (decayed, quarter))
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


def test_the_last_round_is_always_evaluated() -> None:
    run = experiment(rounds=3)
    assert ["accuracy" in step.record for step in run.play()] == [False, True, True]


def test_dropout_is_addressed_too() -> None:
    """A model with its own randomness trains to the same bytes twice, and differently on another device's address."""
    run = experiment()

    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = two_exits().build("simple")

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return list(self.inner(torch.nn.functional.dropout(x, 0.5, self.training)))

    from fedhen import Family

    one = replace(config(), tiers={"only": 1.0})
    results: list[Weights] = []
    for _ in range(2):
        noisy = assemble(one, data=run.data, family=Family({"only": Noisy}), accelerator="cpu")
        torch.manual_seed(len(results))  # what was drawn elsewhere must not matter
        results.append(noisy.devices.train_one(1, 0, noisy.server["only"]).weights)
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])
