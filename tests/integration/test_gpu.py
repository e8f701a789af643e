"""On a GPU: `pytest -m gpu`. The same code trains there, on data that lies there, and agrees with the CPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhen import Family
from fedhen.config import toml, validation
from fedhen.config.recipes import load_recipe
from fedhen.data.batches import make_batch, plan_visits
from fedhen.data.dataset import Data
from fedhen.data.spec import Normalisation
from fedhen.engines.cuda.graphs import GraphDevices
from fedhen.errors import FedhenError
from fedhen.experiment.build import build_experiment
from fedhen.experiment.experiment import Experiment
from fedhen.experiment.reported_models import AllDevicesAverage
from fedhen.experiment.resume import NEW_RUN, ResumePolicy
from fedhen.experiment.runner import play_run
from fedhen.models.registry import make_family
from fedhen.params import Weights
from fedhen.seeds import DeviceStreams
from support.families import two_exits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FRESH = "FEDHEN_FRESH_PROCESS"
"""Set in the process that a test started for itself alone."""
METHODS = ["fedhen", "noside", "decouple", "fedavg"]
LOCALS = ["plain", "fedprox", "scaffold", "feddyn"]


def numbers(
    accelerator: str,
    method: str,
    local: str,
    engine: str = "fast",
    dtype: torch.dtype = torch.float64,
    **settings: object,
) -> Experiment:
    """A small fleet on random numbers, with a smooth network."""
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(120, 6))).to(dtype), torch.from_numpy(rng.integers(0, 3, 120))
    chosen = {
        "method": method,
        "rounds": 3,
        "devices": {"number": 10, "active": 4},
        "model": {"family": "python"},
        "local": {"name": local},
        "training": {"epochs": 2, "batch_size": 4},
        "runtime": {"engine": engine, "precision": "fp32"},
        **settings,
    }
    data = Data(x[:80], y[:80], x[80:], y[80:], 3)
    double = two_exits()
    family = Family({tier: partial(lambda tier: double.build(tier).to(dtype), tier) for tier in double.tiers})
    return build_experiment(validation.from_mapping(chosen), data=data, family=family, accelerator=accelerator)


def digits(*settings: str, recipe: str = "digits") -> Experiment:
    config = toml.apply_settings(load_recipe(recipe), ["rounds=3", "evaluation.every=3", *settings])
    return build_experiment(config, accelerator="cuda")


def played(experiment: Experiment) -> Experiment:
    for _ in experiment.play():
        pass
    return experiment


def moved(weights: Weights, start: Weights) -> Tensor:
    return torch.cat([(weights[n] - start[n]).double().reshape(-1) for n in weights])


def apart(a: Experiment, b: Experiment, start: Mapping[str, Weights] | None = None) -> float:
    """How far two runs' server models are from each other, in units of how far the first has moved."""
    assert isinstance(a.last_models, AllDevicesAverage)
    start = start or a.last_models.initial
    found = [
        float(
            (moved(a.server[t], start[t]) - moved(b.server[t], start[t])).norm() / moved(a.server[t], start[t]).norm()
        )
        for t in a.server
    ]
    return max(found)


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("method", METHODS)
def test_three_rounds_agree_with_the_cpu(method: str, local: str) -> None:
    """In float64, within 1e-9."""
    cpu, gpu = (numbers(*where) for where in (("cpu", method, local, "plain"), ("cuda", method, local)))
    for a, b in zip(cpu.play(), gpu.play(), strict=True):
        assert a.record["active"] == b.record["active"]
        assert a.record["loss"] == pytest.approx(b.record["loss"], abs=1e-9)
    assert gpu.engine.devices.groups.slots and not gpu.engine.devices.groups.refused  # type: ignore[attr-defined]
    for tier, weights in cpu.server.items():
        for name, tensor in weights.items():
            torch.testing.assert_close(gpu.server[tier][name].cpu(), tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("training", "missing"),
    [
        ({"optimizer": "adamw", "lr": 0.01}, "training.optimizer=adamw"),
        ({"optimizer": "adam", "lr": 0.01, "optimizer_state": "device"}, "training.optimizer=adam"),
        ({"momentum": 0.9, "optimizer_state": "device"}, "training.optimizer_state=device"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_kernel_is_said_once_and_trained_without(training: dict[str, object], missing: str) -> None:
    """In float64, within 1e-9 of the CPU, with an optimiser on the server too."""
    settings: dict[str, object] = {"training": {"epochs": 2, "batch_size": 4, **training}}
    settings["server"] = {"optimizer": "yogi", "lr": 0.1, "tau": 0.1}
    with pytest.warns(UserWarning, match=f"has no kernel for {missing}: devices train one by one") as told:
        gpu = played(numbers("cuda", "fedhen", "feddyn", **settings))  # type: ignore[arg-type]
    cpu = played(numbers("cpu", "fedhen", "feddyn", "plain", **settings))  # type: ignore[arg-type]
    assert len(told) == 1
    for tier, weights in cpu.server.items():
        for name, tensor in weights.items():
            torch.testing.assert_close(gpu.server[tier][name].cpu(), tensor, rtol=1e-9, atol=1e-9)


def a_step(method: str, engine: str) -> Experiment:
    """The digits in fp32, each device with all of its images in one batch."""
    settings = "runtime.precision=fp32", "rounds=1", "training.epochs=1", "training.batch_size=70"
    return digits(f"method={method}", f"runtime.engine={engine}", *settings)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_agrees_with_the_sequential_engine(method: str) -> None:
    assert apart(played(a_step(method, "plain")), played(a_step(method, "fast"))) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_a_step_from_trained_weights_agrees(method: str) -> None:
    """After three rounds in float64, within 1e-3: a unit of a ReLU that falls on the other side is seen."""
    trained = in_double("runtime.engine=plain", f"method={method}", "training.epochs=1", "training.lr=0.03").server
    plain, fast = a_step(method, "plain"), a_step(method, "fast")
    for experiment in (plain, fast):
        for tier, weights in experiment.server.items():
            for name, tensor in weights.items():
                tensor.copy_(trained[tier][name])
        played(experiment)
    assert apart(plain, fast, trained) < 1e-3


def in_double(*settings: str) -> Experiment:
    """The digits' networks in float64."""
    # One worker: no process can be forked here, since this one has used the GPU.
    fixed = ["rounds=3", "evaluation.every=3", "runtime.workers=1"]
    config = toml.apply_settings(load_recipe("digits"), [*fixed, *settings])
    data = build_experiment(config, accelerator="cpu").population.data
    single = make_family(config, data.shape, data.classes)
    builds = {tier: partial(lambda tier: single.build(tier).double(), tier) for tier in single.tiers}
    return played(build_experiment(config, family=Family(builds), accelerator="cuda"))


@pytest.mark.parametrize("method", METHODS)
def test_three_rounds_of_the_digits_agree(method: str) -> None:
    """In float64, within 1e-6.

    Not in fp32: a unit of a ReLU that is 0 but for rounding may fall on either side, and the way forks. A start that is
    moved by 1e-7 of its weights ends 1e-5 of its way from the first, or several percent.
    """
    settings = f"method={method}", "training.epochs=1", "training.lr=0.03"
    exact, engine = in_double("runtime.engine=plain", *settings), in_double(*settings)
    assert not engine.engine.devices.groups.refused  # type: ignore[attr-defined]
    assert apart(exact, engine) < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_three_rounds_of_a_smooth_network_agree_in_single_precision(method: str) -> None:
    plain, fast = (played(numbers("cuda", method, "plain", engine, torch.float32)) for engine in ("plain", "fast"))
    assert not fast.engine.devices.groups.refused  # type: ignore[attr-defined]
    assert apart(plain, fast) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        ["split.kind=dirichlet-by-class", "split.minimum=5", "training.batch_size=16"],
        ["training.last_batch=drop", "training.batch_size=20"],
        ["training.momentum=0.9", "training.lr=0.01"],
        ["training.masked_loss=true"],
        ["objective.distillation=0.1"],
        *(["local.name=" + name] for name in LOCALS[1:]),
    ],
    ids=lambda settings: settings[0],
)
def test_the_engine_agrees_in_every_setting(settings: list[str]) -> None:
    both = ["runtime.precision=fp32", "rounds=1", "training.epochs=1", *settings]
    fast = played(digits(*both))
    assert not fast.engine.devices.groups.refused  # type: ignore[attr-defined]
    assert apart(played(digits("runtime.engine=plain", *both)), fast) < 1e-3


def test_four_tiers_agree() -> None:
    both = ["runtime.precision=fp32", "rounds=1", "training.epochs=1"]
    plain, fast = (played(digits(f"runtime.engine={name}", *both, recipe="digits-4")) for name in ("plain", "fast"))
    assert apart(plain, fast) < 1e-3


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precisions_stay_near(precision: str) -> None:
    both = ["rounds=1", "training.epochs=1", "training.batch_size=70", f"runtime.precision={precision}"]
    assert apart(played(digits("runtime.engine=plain", *both)), played(digits(*both))) < 0.05


class Own(nn.Module):
    """A user's network, with a given layer between its products."""

    def __init__(self, deep: bool, extra: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.exit = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 10)
        self.second = nn.Conv2d(8, 8, 3, padding=1) if deep else None
        self.top = nn.Linear(8, 10) if deep else None
        self.extra = extra

    def forward(self, x: Tensor) -> list[Tensor]:
        x = torch.tanh(self.first(x))
        x = self.extra(x) if self.training else x
        logits = [self.exit(x.amax((2, 3)))]
        if self.second is not None and self.top is not None:
            logits.append(self.top(F.gelu(self.second(x)).mean((2, 3))))
        return logits


def own(extra: Callable[[Tensor], Tensor], *settings: str) -> Experiment:
    family = Family({"simple": lambda: Own(False, extra), "complex": lambda: Own(True, extra)})
    config = toml.apply_settings(
        load_recipe("digits"),
        ["rounds=2", "evaluation.every=2", "runtime.precision=fp32", "training.epochs=1", *settings],
    )
    return played(build_experiment(config, family=family, accelerator="cuda"))


def test_a_users_own_family_is_captured() -> None:
    fast = own(torch.nn.Identity())
    assert not fast.engine.devices.groups.refused  # type: ignore[attr-defined]
    assert apart(own(torch.nn.Identity(), "runtime.engine=plain"), fast) < 1e-3


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (lambda x: F.dropout(x, 0.2), "it draws random numbers"),
        (lambda x: x * min(1.0, float(x.abs().sum()) + 1), "cannot be captured"),
    ],
    ids=["dropout", "a number read on the host"],
)
def test_a_module_that_cannot_be_captured_is_trained_plainly_with_one_warning(
    extra: Callable[[Tensor], Tensor], reason: str
) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fast = own(extra)
    told = [str(w.message) for w in said if "one device at a time" in str(w.message)]
    assert len(told) == 2 and all(reason in line for line in told)
    assert apart(own(extra, "runtime.engine=plain"), fast) < 1e-4
    torch.randn(2, device="cuda")  # A capture that broke must not keep others from drawing.


def test_a_device_that_diverges_harms_no_other() -> None:
    found = digits("training.lr=1e30", "training.clip=1e30", "runtime.precision=fp32", "rounds=1")
    assert [len(s.record["dropped"]) for s in found.play()] == [6]


def held() -> int:
    """Bytes of the GPU that torch holds when all that is gone has been given back."""
    gc.collect()
    # Every stream that ever multiplied has kept its workspace.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_runs_one_after_the_other_need_no_more_than_one() -> None:
    """What is left of a run that is over is given back before the next takes its own."""
    held()
    torch.cuda.reset_peak_memory_stats()
    played(digits("rounds=1"))
    one = torch.cuda.max_memory_reserved()
    for _ in range(3):
        played(digits("rounds=1"))
    assert torch.cuda.max_memory_reserved() <= 1.2 * one


def test_fewer_devices_train_at_a_time_if_memory_runs_out(request: pytest.FixtureRequest) -> None:
    """The process may have what one device of each tier took, and a third of what more took; much less is one line.

    In a process of its own: what streams of earlier runs keep cannot be given back.
    """
    if FRESH not in os.environ:
        again = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", request.node.nodeid]
        done = subprocess.run(again, env={**os.environ, FRESH: "1"}, cwd=request.config.rootpath, check=False)
        assert done.returncode == 0
        return
    small = ["devices.number=16", "devices.active=16", "rounds=1", "evaluation.every=1", "runtime.precision=fp32"]
    small += ["training.epochs=1", "training.batch_size=100"]  # a step each
    found = []
    """What was held at rest, and at most."""

    def taken(*settings: str) -> Experiment:
        at_rest = held()
        torch.cuda.reset_peak_memory_stats()
        experiment = played(digits(*small, *settings))
        found.append((at_rest, torch.cuda.max_memory_reserved()))
        return experiment

    plain = played(digits(*small, "runtime.engine=plain"))
    taken("devices.active=2")
    taken()
    (_, few), (_, many) = found
    total = torch.cuda.mem_get_info()[1]
    assert held() < few, found
    try:
        torch.cuda.set_per_process_memory_fraction((few + (many - few) / 3) / total)
        scarce = taken()
        devices = scarce.engine.devices
        assert isinstance(devices, GraphDevices)
        assert 1 <= devices.groups.max_slots < 8 and not devices.groups.refused, found
        assert 1 <= max(map(len, devices.groups.slots.values())) <= devices.groups.max_slots
        assert apart(plain, scarce) < 1e-5
        del scarce, devices
        torch.cuda.set_per_process_memory_fraction(few / 20 / total)
        with pytest.raises((FedhenError, torch.OutOfMemoryError), match=r"out of memory|CUDA"):
            taken()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    """In float64 within 1e-9: on a GPU sums may come in another order."""
    whole, first, rest = (numbers("cuda", "fedhen", "scaffold", rounds=rounds) for rounds in (6, 3, 6))
    for experiment, name, how in ((whole, "a", NEW_RUN), (first, "b", NEW_RUN), (rest, "b", ResumePolicy(resume=True))):
        (tmp_path / name).mkdir(exist_ok=True)
        for _ in play_run(tmp_path / name, experiment, how):
            pass
    assert rest.played == 6
    for tier, weights in whole.server.items():
        for name, tensor in weights.items():
            torch.testing.assert_close(rest.server[tier][name], tensor, rtol=1e-9, atol=1e-9)


def test_images_lie_on_the_gpu_and_are_prepared_there_as_on_the_cpu() -> None:
    images = torch.randint(0, 256, (60, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(60) % 10
    here = Data(images, labels, images, labels, 10, normalisation=Normalisation((120.0,) * 3, (60.0,) * 3))
    there = here.to(torch.device("cuda"))
    assert there.x.is_cuda and there.x.dtype == torch.uint8
    plan = plan_visits(np.arange(60), 1, 50, False, DeviceStreams(0, (1, 2)))
    for part in plan.batches():
        (x, y), (u, v) = (make_batch(data, plan, part, "crop-flip") for data in (here, there))
        assert u.is_cuda
        torch.testing.assert_close(u.cpu(), x, rtol=1e-6, atol=1e-6)
        assert torch.equal(v.cpu(), y)


@pytest.mark.parametrize("engine", ["plain", "fast"])
def test_the_digits_learn_on_a_gpu(engine: str) -> None:
    config = toml.apply_settings(load_recipe("digits"), ["rounds=15", f"runtime.engine={engine}"])
    records = [step.record for step in build_experiment(config, accelerator="cuda").play()]
    assert records[-1]["accuracy"]["server"]["simple"] > 0.75
