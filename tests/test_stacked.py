"""The fast engine on a CPU against the plain one: the same devices, weights and losses within rounding.

Tolerances are relative to the largest number of a tensor: 1e-10 in float64, where rounding is about 1e-16 a step; in
float32, where it is about 1e-7, 1e-5 after a step and more after many, as steps carry differences along.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families import TwoExits, came_back, two_exits
from fedhen import Family, cores, schema
from fedhen.algorithm.merging import share_common_weights
from fedhen.algorithm.methods import Method
from fedhen.assembly import assemble
from fedhen.cli.main import main
from fedhen.cores import side_by_side
from fedhen.data.dataset import Data, per_device
from fedhen.experiment import Experiment
from fedhen.models.preact_resnet import Shape, preact_resnet
from fedhen.rounds import Sent
from fedhen.runtimes import stacked
from fedhen.runtimes.plain import PlainDevices
from fedhen.runtimes.stack_convolutions import BY_TAP, products
from fedhen.runtimes.stacked import Costs, StackedDevices, dealt

METHODS = ["fedhen", "noside", "decouple", "side-apart", "fedavg"]
LOCALS = ["plain", "fedprox", "scaffold", "feddyn"]
LENGTHS: dict[str, dict[str, Any]] = {
    "one step": {"rounds": 1, "training": {"epochs": 1, "batch_size": 100}},
    "one epoch": {"rounds": 1, "training": {"epochs": 1, "batch_size": 5}},
    "three rounds": {"rounds": 3, "training": {"epochs": 2, "batch_size": 5}},
}


def vectors(dtype: torch.dtype = torch.float64) -> Data:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(120, 6))).to(dtype), torch.from_numpy(rng.integers(0, 3, 120))
    return Data(x[:96], y[:96], x[96:], y[96:], 3)


def images(size: int = 8) -> Data:
    rng = np.random.default_rng(1)
    x, y = torch.from_numpy(rng.normal(size=(120, 1, size, size))).float(), torch.from_numpy(rng.integers(0, 3, 120))
    return Data(x[:96], y[:96], x[96:], y[96:], 3)


def resnet(tiers: int = 2, **more: Any) -> Family:
    exits = {2: {"simple": 2, "complex": 4}, 3: {"a": 1, "b": 3, "c": 4}, 4: {"a": 1, "b": 2, "c": 3, "d": 4}}[tiers]
    shape: dict[str, Any] = {"widths": (4, 6, 8, 8), "blocks": (1, 1, 1, 1), "strides": (1, 2, 2, 1), "exit_pool": 1}
    return preact_resnet(Shape(channels=1, size=8, classes=3, exits=exits, **{**shape, **more}))


def experiment(engine: str, family: Family, data: Data, /, **settings: Any) -> Experiment:
    base: dict[str, Any] = {
        "rounds": 1,
        "devices": {"number": 8, "active": 5},
        "model": {"family": "python"},
        "training": {"epochs": 2, "batch_size": 5},
        "local": {"name": "plain", "mu": 0.5, "alpha": 0.2},
        "evaluation": {"every": 1},
        "runtime": {"engine": engine, "threads": 1},
    }
    merged = {k: {**base.get(k, {}), **v} if isinstance(v, dict) and k != "tiers" else v for k, v in settings.items()}
    config = schema.from_mapping({**base, **merged})
    if config.method == "fedavg":
        config = replace(config, tiers={list(config.tiers)[-1]: 1.0})
    return assemble(config, data=data, family=family, accelerator="cpu")


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * (0.01 + float(b.abs().max())))


def agree(family: Family, data: Data, tolerance: float, /, **settings: Any) -> Experiment:
    """Play both engines round by round; every tier must really be stacked, without a word."""
    plain, fast = (experiment(engine, family, data, **settings) for engine in ("plain", "fast"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for a, b in zip(plain.play(), fast.play(), strict=True):
            assert a.record["active"] == b.record["active"] and a.record["dropped"] == b.record["dropped"]
            assert b.record["loss"] == pytest.approx(a.record["loss"], rel=10 * tolerance)
    assert isinstance(plain.devices, PlainDevices) and isinstance(fast.devices, StackedDevices)
    assert fast.devices.stacks and None not in fast.devices.stacks.values()
    # SCAFFOLD's memory is a difference of weights over steps · lr: small numbers with the weights' rounding, magnified.
    for one, other, factor in ((plain.server, fast.server, 1), (plain.memories.mean, fast.memories.mean, 100)):
        for tier, weights in one.items():
            assert weights.keys() == other[tier].keys()
            for name, tensor in weights.items():
                close(other[tier][name], tensor, factor * tolerance)
    for device, row in plain.last_models.rows.items():
        assert list(row) == list(fast.last_models.rows[device])
        for name, tensor in row.items():
            close(fast.last_models.rows[device][name], tensor, tolerance)
    return fast


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_variant_on_two_tanh_layers(method: str, local: str, length: str) -> None:
    agree(two_exits(), vectors(), 1e-10, method=method, **LENGTHS[length], local={"name": local})


@pytest.mark.parametrize(("method", "local"), [*zip(METHODS, [*LOCALS, "plain"], strict=True), ("noside", "feddyn")])
def test_methods_on_a_small_resnet(method: str, local: str) -> None:
    for length, tolerance in (("one step", 1e-5), ("one epoch", 1e-4), ("three rounds", 1e-3)):
        agree(resnet(), images(), tolerance, method=method, **LENGTHS[length], local={"name": local})


@pytest.mark.parametrize("augmentation", ["crop-flip", "half-crop-flip"])
def test_every_device_gets_its_own_crops_and_flips(augmentation: str) -> None:
    agree(resnet(), images(), 1e-4, **LENGTHS["one epoch"], data={"augmentation": augmentation})


@pytest.mark.parametrize("tiers", [3, 4])
def test_three_and_four_tiers(tiers: int) -> None:
    family = resnet(tiers)
    shares = dict.fromkeys(family.tiers, 1 / tiers)
    settings = {"tiers": shares, "devices": {"number": 12, "active": 9}, "training": {"epochs": 1, "batch_size": 8}}
    agree(family, images(), 1e-4, **settings)


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
@pytest.mark.parametrize("local", ["plain", "scaffold"])
def test_devices_of_unequal_size_and_every_setting(training: dict[str, Any], local: str) -> None:
    """By class the devices have from 2 to 30 images: short last batches of many sizes, and some are done early."""
    split = {"kind": "dirichlet-by-class", "alpha": 0.4, "minimum": 2}
    settings = {"split": split, "rounds": 3, "devices": {"number": 8, "active": 6}, "local": {"name": local}}
    fast = agree(two_exits(), vectors(), 1e-10, **settings, training={"epochs": 2, "batch_size": 4, **training})
    assert len({len(shard) % 4 for shard in fast.data.shards}) > 2


def test_exit_weights_distillation_label_rows_and_the_ensemble() -> None:
    more = {"objective": {"weights": {"simple": 0.3}, "distillation": 0.5, "temperature": 2.0}}
    agree(two_exits(), vectors(), 1e-10, rounds=2, **more, evaluation={"every": 1, "ensemble": True})
    agree(resnet(), images(), 1e-4, server={"label_rows": True}, split={"kind": "dirichlet", "alpha": 0.3})
    agree(resnet(), images(), 2e-2, runtime={"precision": "bf16"}, **LENGTHS["one step"])


def test_an_unread_exit_comes_back_to_the_bit() -> None:
    """NoSide's complex devices hold the simple exit, and no loss of theirs reaches it."""
    fast = experiment("fast", resnet(), images(), method="noside", training={"momentum": 0.9})
    sent = Sent(fast.server, fast.memories.mean)
    for update in came_back(fast.devices.train(1, sent, [4, 5, 6])):
        untouched = [n for n in update.weights if n not in update.trained]
        assert untouched and all(torch.equal(update.weights[n], sent.models["complex"][n]) for n in untouched)


class Perceptron(nn.Module):
    """Two exits, a frozen scale, a constant, a bare parameter, and operations that have no rule of their own."""

    constant: Tensor

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Softplus())
        self.scale = nn.Parameter(torch.rand(10) + 0.5, requires_grad=False)
        self.gain = nn.Parameter(torch.rand(()))
        self.exit = nn.Linear(10, 3, bias=False)
        self.second = nn.Linear(10, 10) if deep else None
        self.top = nn.Linear(20, 3) if deep else None
        self.register_buffer("constant", torch.linspace(0, 1, 10), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.first(x.view(x.size(0), -1)) * self.scale + self.constant
        h = (1 - self.gain) * h + self.gain * torch.cumsum(h, dim=1)
        logits = (self.exit(h),)
        if self.second is None or self.top is None:
            return logits
        both = torch.cat([h, F.hardswish(self.second(h))], dim=-1)
        return (*logits, self.top(both))


class Convolutions(nn.Module):
    """A small CNN: grouped, dilated and biased convolutions, pools, and an exit from tokens."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=3), nn.MaxPool2d(2))
        self.mix = nn.Conv2d(6, 4, 1, stride=2)
        self.exit = nn.Linear(24, 3)
        self.deep = nn.Conv2d(6, 8, 3, padding=1) if deep else None
        self.top = nn.Linear(12, 3) if deep else None

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.body(self.stem(x))
        logits = [self.exit(h.flatten(1))]
        if self.deep is not None and self.top is not None:
            tokens = F.gelu(self.deep(h)).flatten(2).transpose(1, 2)
            logits.append(self.top(torch.cat([tokens.mean(1), self.mix(h).mean((2, 3))], 1)))
        return logits


class ByLength(TwoExits):
    """Cannot be traced: it asks for the length of its input."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return super().forward(x * len(x) / len(x))


def both(build: Callable[[bool], nn.Module], **more: Any) -> Family:
    return Family({"simple": lambda: build(False), "complex": lambda: build(True)}, **more)


def test_a_users_own_perceptron_convolutions_and_untraceable_module() -> None:
    for method in ("fedhen", "noside"):
        agree(both(lambda deep: Perceptron(deep).double()), vectors(), 1e-10, method=method, rounds=2)
        agree(both(Convolutions), images(), 1e-4, method=method)
        agree(both(lambda deep: ByLength(6, 3, deep)), vectors(), 1e-10, method=method, rounds=2)


def squares(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    return torch.stack([F.mse_loss(z.softmax(1), F.one_hot(labels, 3).to(z)) for z in logits]).sum()


def test_an_objective_of_ones_own_goes_through_vmap() -> None:
    own, found = Method("own", squares, share_common_weights), []
    for engine in ("plain", "fast"):
        config = replace(experiment(engine, two_exits(), vectors(), rounds=2).config, method="own")
        run = assemble(config, data=vectors(), family=two_exits(), method=own, accelerator="cpu")
        list(run.play())
        found.append(run)
    assert None not in found[1].devices.stacks.values()  # type: ignore[attr-defined]
    for name, tensor in found[0].server["complex"].items():
        close(found[1].server["complex"][name], tensor, 1e-10)


@contextmanager
def told() -> Iterator[list[str]]:
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in caught]


class Dropping(TwoExits):
    def forward(self, x: Tensor) -> list[Tensor]:
        return super().forward(F.dropout(x, 0.5, self.training))


class Normed(TwoExits):
    def __init__(self, inputs: int, classes: int, deep: bool) -> None:
        super().__init__(inputs, classes, deep)
        self.norm = nn.BatchNorm1d(inputs).double()

    def forward(self, x: Tensor) -> list[Tensor]:
        return super().forward(self.norm(x))


@pytest.mark.parametrize(
    ("family", "data", "reason"),
    [
        (both(lambda deep: Dropping(6, 3, deep)), vectors(), "random"),
        (both(lambda deep: Normed(6, 3, deep), average_buffers=True), vectors(), "'norm.running_mean'"),
        (resnet(nesting="width", rates={"simple": 0.5, "complex": 1.0}), images(), "passes of their own"),
    ],
    ids=["dropout", "batch norm", "width nest"],
)
def test_what_cannot_be_stacked_trains_as_before_and_says_so_once(family: Family, data: Data, reason: str) -> None:
    """The smallest tier of a width nest can be stacked: it has one pass."""
    plain, fast = (experiment(engine, family, data) for engine in ("plain", "fast"))
    sent, active = Sent(plain.server, {}), [0, 1, 4, 6]
    with told() as messages:
        pairs = [came_back(run.devices.train(number, sent, active)) for number in (1, 2) for run in (plain, fast)]
    apart = {tier for tier in ("simple", "complex") if fast.devices.stacks[tier, 0] is None}  # type: ignore[attr-defined]
    assert apart >= {"complex"}
    assert messages == [
        f"tier {t!r} is trained one device at a time: {m.partition(': ')[2]}"
        for t, m in zip(sorted(apart)[::-1], messages, strict=True)
    ]
    assert all(reason in message for message in messages)
    for one, other in (pairs[:2], pairs[2:]):
        found = {update.device: update for update in other}
        for update in one:
            if update.tier in apart:
                assert update.loss == found[update.device].loss
                assert all(torch.equal(found[update.device].weights[n], t) for n, t in update.weights.items())


def test_a_large_model_trains_one_device_after_the_other_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = images().x[:2]
    between = sum(cores.operations(resnet().build(tier), sample) for tier in ("simple", "complex")) / 2
    monkeypatch.setattr(stacked, "LARGE", 5 * between)
    plain, fast = (experiment(engine, resnet(), images(), method="decouple") for engine in ("plain", "fast"))
    with told() as messages:
        list(plain.play())
        list(fast.play())
    stacks = fast.devices.stacks  # type: ignore[attr-defined]
    assert messages == [] and stacks["complex", 0] is None and stacks["simple", 0] is not None
    assert all(torch.equal(fast.server["complex"][n], t) for n, t in plain.server["complex"].items())


def test_a_device_that_diverges_does_so_alone() -> None:
    """Device 1's inputs are huge: it ends in NaN and is dropped; its neighbours in the stack train as without it."""
    data = vectors()
    shares = [np.arange(12 * k, 12 * k + 12) for k in range(8)]
    x = data.x.clone()
    x[shares[1]] = torch.nan
    poisoned = per_device([(x[s], data.y[s]) for s in shares], data.x_test, data.y_test, 3)
    runs = [experiment("fast", two_exits(), poisoned) for _ in range(2)]
    sent = Sent(runs[0].server, {})
    with_it = {u.device: u for u in came_back(runs[0].devices.train(1, sent, [0, 1, 2]))}
    without = {u.device: u for u in came_back(runs[1].devices.train(1, sent, [0, 2]))}
    assert not all(bool(torch.isfinite(t).all()) for t in with_it[1].weights.values())
    for device in (0, 2):
        for name, tensor in without[device].weights.items():
            close(with_it[device].weights[name], tensor, 1e-12)


def test_the_same_seed_gives_the_same_bytes_twice_with_two_threads_and_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The devices are dealt to stacks by their cost; the number of threads at work changes nothing."""
    monkeypatch.setattr(stacked, "WORTH_A_THREAD", 0.0)
    found = []
    for workers in (2, 2, 1):
        with ThreadPoolExecutor(workers) as pool:
            monkeypatch.setattr(cores, "pool", lambda pool=pool: pool)
            run = experiment("fast", resnet(), images(), rounds=2)
            list(run.play())
        assert {piece for _, piece in run.devices.stacks} == {0, 1}  # type: ignore[attr-defined]
        found.append(run.server["complex"])
    for other in found[1:]:
        assert all(torch.equal(found[0][name], tensor) for name, tensor in other.items())


def test_few_products_are_the_convolution() -> None:
    """All small images, kernels, strides and paddings that have a form, against torch's own, device by device."""
    forms = {}
    for side, size, stride, padding in product([1, 2, 3], [1, 2, 3, 5], [1, 2], [0, 1, 2]):
        layer = nn.Conv2d(3, 4, (size, 3), (stride, 1), (padding, 1)).double()
        shape = 5, 3, side, 2
        if padding > size or size > side + 2 * padding or (form := products(layer, shape)) is None:
            continue
        x, weights = torch.randn(5, 2, *shape[1:]).double(), torch.randn(2, *layer.weight.shape).double()
        bias = torch.randn(2, 4).double()
        found = form(x, weights.permute(BY_TAP), bias)
        for device in range(2):
            alone = F.conv2d(x[:, device], weights[device], bias[device], layer.stride, layer.padding)
            torch.testing.assert_close(found[:, device], alone, rtol=0, atol=1e-12)
        forms[side, size, stride, padding] = found.shape[-2]
    # 3 taps over one or two pixels, also by two; 2 pixels, 5 taps; a tap each.
    expected = {(1, 3, 1, 1): 1, (2, 3, 1, 1): 2, (2, 3, 2, 1): 1, (2, 5, 1, 2): 2, (1, 1, 1, 0): 1, (2, 2, 1, 0): 1}
    assert expected.items() <= forms.items() and (3, 3, 1, 1) not in forms and (2, 3, 1, 2) not in forms


def test_devices_are_dealt_by_cost() -> None:
    """Costs 5, 5, 5 and 1, 1, 1, and 2 for each stack: 5 | 5, then 12 | 7, and the small ones join the lighter part."""
    tier_of = ["c", "c", "c", "s", "s", "s"]
    costs = Costs(tier_of, dict(enumerate([5.0, 5.0, 5.0, 1.0, 1.0, 1.0])), dict.fromkeys(range(6), 2.0))
    assert dealt(costs, 2) == [[0, 2], [1, 3, 4, 5]]
    assert dealt(costs, 1) == [[0, 1, 2, 3, 4, 5]]


def test_tiers_stay_together_where_their_stacks_are_dear() -> None:
    """3, 3 | 1, 1, 1, 1 with stacks of 10 each: one by one 3 + 1 + 1 + 20 in both parts, a tier at a time 16 and 14."""
    each = dict(enumerate([3.0, 3.0, 1.0, 1.0, 1.0, 1.0]))
    assert dealt(Costs(["c", "c", "s", "s", "s", "s"], each, dict.fromkeys(each, 10.0)), 2) == [[0, 1], [2, 3, 4, 5]]


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda number: 1 // number, [1, 0], 1)


def test_the_command_line_tells_a_warning_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    width = ["--set", "model.nesting=width", "--set", "model.widths=[4,4,4,4]", "--set", "data.limit=60"]
    assert main(["run", "digits", "--rounds", "1", "--out", str(tmp_path / "run"), "--accelerator", "cpu", *width]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "one device at a time" in line]
    assert lines == ["fedhen: tier 'complex' is trained one device at a time: its exits are passes of their own"]
