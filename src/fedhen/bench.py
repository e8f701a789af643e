"""How fast this machine plays a recipe: the plain loop and the fast engine in one run, beside the machine's ceiling."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedhen import environment
from fedhen.assembly import assemble
from fedhen.config import Config
from fedhen.cores import torch_threads
from fedhen.data import sources
from fedhen.data.batches import batch
from fedhen.data.dataset import Data
from fedhen.data.storage import data_root
from fedhen.errors import UserError
from fedhen.experiment import Experiment, Step
from fedhen.params import size
from fedhen.rounds import Sent
from fedhen.runtimes.plain import PlainDevices

SHAPES = {"cifar10": (3, 32, 32, 10), "cifar100": (3, 32, 32, 100)}
"""Channels, height, width and classes of data that random numbers can stand in for."""


@dataclass(frozen=True)
class Ask:
    """What to measure."""

    config: Config
    rounds: int
    """Of the fast engine; the plain loop plays as many as take about a minute, at most."""
    accelerator: str = "auto"
    data_dir: Path | None = None


def bench(ask: Ask, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure; `say` is told what happens meanwhile."""
    data, real = load(ask)
    where = environment.accelerator(ask.accelerator, ask.config.runtime)
    precision = assemble(ask.config, data=data, accelerator=ask.accelerator).precision.name
    found: dict[str, Any] = {
        "recipe": ask.config.recipe,
        "method": ask.config.method,
        "precision": precision,
        "data": ask.config.data.name if real else f"random numbers in the shape of {ask.config.data.name}",
        **environment.describe(where),
    }
    say("the matrix product")
    ceiling = product_rate(where, precision)
    loops = {"fast": with_runtime(ask.config, "fast", precision), "plain": with_runtime(ask.config, "plain", precision)}
    if precision == "bf16":
        # Where launches are the limit a plain loop is faster without autocast: the ratio is to the faster one.
        loops["plain tf32"] = with_runtime(ask.config, "plain", "tf32")
    seconds: dict[str, dict[int, float]] = {}
    for name, config in loops.items():
        say(f"{ask.config.recipe}, {name}")
        loop = assemble(config, data=data, accelerator=ask.accelerator)
        found[name], seconds[name] = measured(loop, ask.rounds if name == "fast" else 0)
        found[name]["share_of_ceiling"] = found[name]["tflops"] / ceiling
        del loop
    # Rounds differ in which devices are active: only those that all have played are compared.
    same = set.intersection(*map(set, seconds.values()))
    for name, own in seconds.items():
        found[name]["seconds_a_round_of_all"] = mean(own[number] for number in same)
    best = min(found[name]["seconds_a_round_of_all"] for name in loops if name != "fast")
    say("the side objective")
    return {
        **found,
        "ceiling_tflops": ceiling,
        "ratio": best / found["fast"]["seconds_a_round_of_all"],
        "side_objective": side_objective(ask, data),
    }


def load(ask: Ask) -> tuple[Data, bool]:
    """The recipe's data, or random numbers in its shape where it is not on this machine: time does not see which."""
    try:
        return sources.load(ask.config.data, data_root(ask.data_dir), ask.config.seed), True
    except UserError:
        if ask.config.data.name not in SHAPES:
            raise
    *shape, classes = SHAPES[ask.config.data.name]
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (60000, *shape), dtype=torch.uint8, generator=draw).float().div_(255)
    y = torch.randint(0, classes, (60000,), generator=draw)
    limit = ask.config.data.limit or 50000
    return Data(x[:limit], y[:limit], x[50000 : 50000 + limit], y[50000 : 50000 + limit], classes), False


def with_runtime(config: Config, engine: str, precision: str) -> Config:
    """The configuration on that engine."""
    runtime = replace(config.runtime, engine=engine, precision=precision)  # type: ignore[arg-type]
    return replace(config, runtime=runtime, rounds=10**6)


def measured(experiment: Experiment, rounds: int, budget: float = 40.0) -> tuple[dict[str, Any], dict[int, float]]:
    """Seconds, steps and operations of a loop, and the seconds of each round that counts.

    Without a number of rounds, it plays as many as there is time for.
    """
    reset_peak(experiment.data.x.device)
    began, steps = time.perf_counter(), []
    # Until everything has been used once: graphs are captured, kernels chosen, and models scored.
    warm = experiment.config.evaluation.every + 1
    # A plain loop needs one round for that, and then plays the same ones.
    experiment.played = 0 if rounds else warm - 1
    for step in islice(experiment.play(), warm + rounds if rounds else 11):
        steps.append(step)
        spent = time.perf_counter() - began
        if not rounds and len(steps) > 1 and spent + spent / len(steps) > budget:
            break
    counted = [step for step in steps if step.record["round"] > warm]
    train = mean(step.timing["train"] for step in counted)
    scoring = [step.timing["evaluate"] for step in counted if "accuracy" in step.record]
    evaluate = mean(scoring) if scoring else score_once(experiment)
    ends = [[(d, plan_ends(experiment, s, d)) for d in s.record["active"]] for s in counted]
    each = {tier: operations(experiment, tier) for tier in experiment.server}
    local = mean(sum(len(steps) for _, steps in round_) for round_ in ends)
    work = mean(sum(steps[-1] * each[experiment.tier_of[d]] for d, steps in round_) for round_ in ends)
    scored = evaluate / experiment.config.evaluation.every
    found = {
        "rounds": len(counted),
        "seconds_a_round": train + scored,
        "train": train,
        "evaluate_once": evaluate,
        "first_round": steps[0].timing["train"],
        "steps_a_second": local / train,
        "tflops": work / train / 1e12,
        "peak_memory_mb": peak(experiment.data.x.device) / 1e6,
    }
    return found, {step.record["round"]: step.timing["train"] + scored for step in counted}


def score_once(experiment: Experiment) -> float:
    """Seconds that scoring all models takes."""
    began = time.perf_counter()
    experiment.scores(experiment.models())
    return time.perf_counter() - began


def plain_of(experiment: Experiment) -> PlainDevices:
    """The plain devices behind any engine: they know the plans."""
    devices: Any = experiment.devices
    found = devices if isinstance(devices, PlainDevices) else devices.plain
    assert isinstance(found, PlainDevices)
    return found


def plan_ends(experiment: Experiment, step: Step, device: int) -> Sequence[int]:
    """Where the batches of a device end: one for each of its steps."""
    return [int(end) for end in plain_of(experiment).plan(step.record["round"], device).ends]


def operations(experiment: Experiment, tier: str) -> float:
    """Floating-point operations that one example costs a device of a tier: products, forward and backward."""
    fleet = plain_of(experiment).fleet
    module = plain_of(experiment).new_module(tier).train()
    plan = plain_of(experiment).plan(1, fleet.tier_of.index(tier))
    inputs, labels = batch(fleet.data, plan, slice(0, 2), "none")
    with FlopCounterMode(display=False) as counter:
        fleet.objectives[tier](module(inputs), labels).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops()) / len(labels)


def side_objective(ask: Ask, data: Data) -> dict[str, Any]:
    """What the side objective costs a device of the largest tier: a step's time and operations, and the bytes it sends.

    With it is the method FedHeN; without is Decouple, whose largest model has no exit but its own.
    """
    found: dict[str, Any] = {}
    for label, method in (("with", "fedhen"), ("without", "decouple")):
        config = replace(with_runtime(ask.config, "fast", ask.config.runtime.precision), method=method, method_file="")
        experiment = assemble(config, data=data, accelerator=ask.accelerator)
        tier = list(experiment.server)[-1]
        some = [d for d, t in enumerate(experiment.tier_of) if t == tier][: config.devices.active]
        plain = plain_of(experiment)
        times = list(islice(timed_trainings(experiment, some), 3))
        count = sum(len(plain.plan(2, device).ends) for device in some)
        found[label] = {
            "milliseconds_a_step": 1e3 * min(times[1:]) / count,
            "gflop_an_example": operations(experiment, tier) / 1e9,
            "bytes_each_way": size(experiment.server[tier]),
        }
    return {**found, "ratio": {key: found["with"][key] / found["without"][key] for key in found["with"]}}


def timed_trainings(experiment: Experiment, devices: Sequence[int]) -> Iterator[float]:
    """Seconds that it takes to train these devices, again and again."""
    sent = Sent(experiment.memories.cloud(experiment.server, experiment.local), experiment.memories.mean)
    for number in range(1, 10**6):
        began = time.perf_counter()
        list(experiment.devices.train(number, sent, devices))
        synchronise(experiment.data.x.device)
        yield time.perf_counter() - began


def product_rate(where: torch.device, precision: str) -> float:
    """TFLOP/s of a large matrix product in that precision, on a CPU with all of its cores: the ceiling."""
    side = 8192 if where.type == "cuda" else 2048
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    a, b = (torch.randn(side, side, device=where).to(kind) for _ in range(2))
    times = []
    with torch_threads(os.cpu_count() or 1):
        for _ in range(6):
            synchronise(where)
            began = time.perf_counter()
            a @ b
            synchronise(where)
            times.append(time.perf_counter() - began)
    return 2 * side**3 / min(times) / 1e12


def synchronise(where: torch.device) -> None:
    """Wait until all work there is done."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def reset_peak(where: torch.device) -> None:
    """Measure the peak of memory from here on, where the system allows."""
    if where.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(where)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def peak(where: torch.device) -> float:
    """The peak of memory in bytes: the GPU's, or the process's."""
    if where.type == "cuda":
        return torch.cuda.max_memory_allocated(where)
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
