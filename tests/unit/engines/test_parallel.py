"""Workers give the bytes of one process, whichever of them train."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhen import Family
from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Update
from fedhen.config import toml
from fedhen.data.dataset import Data
from fedhen.engines.parallel import ParallelDevices
from fedhen.engines.sequential import SequentialDevices
from fedhen.experiment.experiment import Experiment
from fedhen.models.preact_resnet import Shape, preact_resnet
from support.families import TwoExits, two_exits
from support.parallel_runs import NUMBERS, both, everything, experiment, vectors

pytestmark = pytest.mark.process

METHODS = ["fedhen", "noside", "decouple", "side-apart", "fedavg"]
LOCALS = ["plain", "fedprox", "scaffold", "feddyn"]


def images() -> Data:
    rng = np.random.default_rng(1)
    x, y = torch.from_numpy(rng.normal(size=(120, 1, 8, 8))).float(), torch.from_numpy(rng.integers(0, 3, 120))
    return Data(x[:96], y[:96], x[96:], y[96:], 3)


def resnet(**more: Any) -> Family:
    shape: dict[str, Any] = {"widths": (4, 6, 8, 8), "blocks": (1, 1, 1, 1), "strides": (1, 2, 2, 1), "exit_pool": 1}
    return preact_resnet(Shape(channels=1, size=8, classes=3, exits={"simple": 2, "complex": 4}, **{**shape, **more}))


def same_bytes(family: Family, data: Data, /, **settings: Any) -> None:
    """Play with 1, 2 and 5 workers: one is this process, several are others, and nothing shows which."""
    runs = [experiment(number, family, data, **settings) for number in NUMBERS]
    assert [type(run.engine.devices) for run in runs] == [SequentialDevices, ParallelDevices, ParallelDevices]
    (records, found), *others = (everything(run) for run in runs)
    assert found and len(records) == runs[0].config.rounds and "accuracy" in records[-1]
    for other in others:
        assert other == (records, found)


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_local_variant(method: str, local: str) -> None:
    same_bytes(two_exits(), vectors(), method=method, local={"name": local})


@pytest.mark.parametrize("name", ["fedrep", "ditto", "proto", "perfedavg"])
def test_personal_models(name: str) -> None:
    """What a device keeps is the same too, with its optimiser's state beside it."""
    evaluation = {"every": 3, "own": True, "devices": False}
    training = {"epochs": 2, "batch_size": 5, "momentum": 0.5, "optimizer_state": "device"}
    same_bytes(two_exits(), vectors(), personal={"name": name}, evaluation=evaluation, training=training)


@pytest.mark.parametrize("local", ["plain", "feddyn"])
@pytest.mark.parametrize("training", [{"momentum": 0.9}, {"optimizer": "adam"}, {"optimizer": "adamw"}], ids=str)
def test_optimisers_whose_state_stays_on_the_device(training: dict[str, Any], local: str) -> None:
    """A device's state travels to the worker that trains it and back; the server's optimiser has a state too."""
    kept = {"lr": 0.01, "optimizer_state": "device", **training}
    server = {"optimizer": "yogi", "lr": 0.1}
    same_bytes(two_exits(), vectors(), training=kept, local={"name": local}, server=server, rounds=4)


@pytest.mark.parametrize("up", ["bf16", "int8", "topk"])
def test_codecs(up: str) -> None:
    """The wire rounds in the process that has the memories, which workers do not see."""
    runs = [coded(number, up) for number in NUMBERS]
    (records, found), *others = (everything(run) for run in runs)
    assert all(other == (records, found) for other in others)
    assert bool(found.keys() & {"memory 0", "memory 1", "memory 2"}) == (up == "topk")


def coded(workers: int, up: str) -> Experiment:
    return experiment(workers, two_exits(), vectors(), wire={"down": "bf16", "up": up}, rounds=4)


@pytest.mark.parametrize("method", ["fedhen", "heterofl"])
@pytest.mark.parametrize("nesting", ["depth", "width"])
def test_networks_of_images_nested_by_depth_and_by_width(method: str, nesting: str) -> None:
    family = resnet(nesting=nesting, rates={"simple": 0.5, "complex": 1.0})
    same_bytes(family, images(), method=method, data={"augmentation": "crop-flip"}, local={"name": "scaffold"})


@pytest.mark.parametrize(
    "training",
    [
        {"last_batch": "drop"},
        {"momentum": 0.9},
        {"masked_loss": True},
        {"clip": 0.05},
        {"weight_decay": 0.5},
        {"lr_decay": 0.5, "lr": 0.3},
    ],
    ids=lambda t: next(iter(t)),
)
def test_every_setting_on_devices_of_unequal_size(training: dict[str, Any]) -> None:
    """By class the devices have from 2 to 30 images."""
    split = {"kind": "dirichlet-by-class", "alpha": 0.4, "minimum": 2}
    same_bytes(
        two_exits(), vectors(), split=split, training={"batch_size": 4, **training}, server={"weighting": "samples"}
    )


def test_precision_exits_ensemble_and_label_rows() -> None:
    more = {"objective": {"exit_weights": {"simple": 0.3}, "distillation": 0.5, "temperature": 2.0}}
    same_bytes(two_exits(), vectors(), **more, evaluation={"ensemble": True, "batch_size": 7})
    same_bytes(resnet(), images(), server={"rows_by_class": True}, split={"kind": "dirichlet", "alpha": 0.3})
    same_bytes(resnet(), images(), rounds=2, runtime={"precision": "bf16"})
    same_bytes(resnet(), images(), rounds=2, runtime={"threads": 2})


class Dropping(TwoExits):
    """Dropout, noise from numpy and from Python, a separate generator, and a counter that changes its output."""

    def __init__(self, deep: bool) -> None:
        super().__init__(6, 3, deep)
        self.own, self.calls = torch.Generator().manual_seed(7), 0

    def forward(self, x: Tensor) -> list[Tensor]:
        if self.training:
            self.calls += 1
            x = F.dropout(x, 0.3) + 0.1 * torch.randn(x.shape, generator=self.own).double()
            x = x * (1 + 0.1 * random.random()) + torch.from_numpy(np.random.normal(size=x.shape)) / self.calls
        return super().forward(x)


class Normed(TwoExits):
    def __init__(self, deep: bool) -> None:
        super().__init__(6, 3, deep)
        self.norm = nn.BatchNorm1d(6).double()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(6).double(), persistent=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        self.seen = self.seen + x.mean(0)
        return super().forward(self.norm(x) + 0.01 * self.seen)


class NotCopied(TwoExits):
    """Cannot be copied: a weight is computed from others when it is built."""

    def __init__(self, deep: bool) -> None:
        super().__init__(6, 3, deep)
        torch.nn.utils.weight_norm(self.body)


@pytest.mark.parametrize(
    ("build", "more"),
    [(Dropping, {}), (Normed, {"average_buffers": True}), (NotCopied, {})],
    ids=["randomness and state", "batch norm and a buffer", "weight_norm"],
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_modules_with_randomness_counters_and_stored_state(
    build: Callable[[bool], nn.Module], more: dict[str, Any]
) -> None:
    same_bytes(both(build, **more), vectors(), method="noside", local={"name": "feddyn"})


def test_dropout_is_drawn_anew_for_every_device_and_round() -> None:
    """The same examples on every device: without separate random numbers all would end with the same weights."""
    data = vectors()
    data = Data(data.x, data.y, data.x_test, data.y_test, 3, shards=tuple(np.arange(96) for _ in range(8)))
    family = both(lambda deep: Dropping(deep))
    run = experiment(2, family, data, training={"batch_size": 96, "epochs": 1})
    sent = Sent(run.server, {})
    found = [
        update.weights["body.weight"].numpy().tobytes()
        for number in (1, 2)
        for update in run.engine.devices.train(number, sent, range(4))
        if isinstance(update, Update)
    ]
    assert len(found) == 8 == len(set(found))


def test_the_global_randomness_of_a_program_is_left_alone() -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(1).item(), np.random.random(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    list(experiment(1, both(Dropping), vectors()).play())
    assert (torch.rand(1).item(), np.random.random(), random.random()) == expected


def test_the_threads_of_the_program_are_its_own() -> None:
    """Inside a round torch has the configured threads; the caller that gets a step has its own number again."""
    seen = []

    class Seeing(TwoExits):
        def forward(self, x: Tensor) -> list[Tensor]:
            seen.append(torch.get_num_threads())
            return super().forward(x)

    family, before = both(lambda deep: Seeing(6, 3, deep)), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run = experiment(1, family, vectors(), runtime={"threads": 2})
        seen.clear()
        for _ in run.play():
            assert torch.get_num_threads() == 3
        assert set(seen) == {2}
    finally:
        torch.set_num_threads(before)


def test_the_old_settings_of_a_run_are_still_read(tmp_path: Path) -> None:
    """Before there were workers, `threads = 0` meant as many as torch takes, and was the default."""
    old = "[runtime]\nengine = 'fast'\nprecision = 'auto'\nrows = 'auto'\nrows_dir = ''\nthreads = 0\n"
    (tmp_path / "old.toml").write_text(old)
    runtime = toml.read_toml(tmp_path / "old.toml").runtime
    assert (runtime.engine, runtime.threads, runtime.workers) == ("fast", 0, 0)
