"""Measures how fast this machine plays a recipe: the plain loop and the fast engine, and the machine's peak."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from fedhen.algorithm.rounds import Sent
from fedhen.config.settings import Config
from fedhen.data import sources
from fedhen.data.dataset import Data
from fedhen.data.storage import data_root
from fedhen.engines.sequential import SequentialDevices
from fedhen.errors import FedhenError
from fedhen.experiment import provenance
from fedhen.experiment.build import build_experiment
from fedhen.experiment.evaluation import score_models
from fedhen.experiment.experiment import Experiment, Step
from fedhen.experiment.recount import SHAPES
from fedhen.hardware.accelerator import choose_device
from fedhen.hardware.peak import measure_product_rate, read_peak_memory, reset_peak_memory, synchronise
from fedhen.models.operations import count_training_operations
from fedhen.params import count_bytes

PLAIN_ROUNDS, PLAIN_SECONDS = 10, 40.0
"""The plain loop is measured for at most this many rounds and seconds, and for at least one round."""
TIMING_SECONDS = 4.0
"""Trainings are repeated for about this many seconds to time them."""
TURN_SECONDS = 2.0
"""Seconds that a loop plays before the next one: long compared with the time to fill the caches again."""

Seconds = dict[tuple[int, ...], float]
"""(Round, active devices...) -> the seconds that the round took."""


@dataclass(frozen=True)
class BenchmarkRequest:
    """What to measure."""

    config: Config
    rounds: int
    """Rounds of the fast engine. The plain loop plays fewer."""
    accelerator: str = "auto"
    data_dir: Path | None = None


def run_benchmark(request: BenchmarkRequest, report: Callable[[str], None]) -> dict[str, Any]:
    """Runs the benchmark and returns its results. `report` is called with a line about each part."""
    data, real = load_or_draw_data(request)
    where = choose_device(request.accelerator)
    precision = build_experiment(request.config, data=data, accelerator=request.accelerator).population.precision.name
    found: dict[str, Any] = {
        "recipe": request.config.recipe,
        "method": request.config.method,
        "precision": precision,
        "data": request.config.data.name if real else f"random numbers in the shape of {request.config.data.name}",
        **provenance.describe_environment(where, request.config.runtime),
    }
    report("the matrix product")
    ceiling = measure_product_rate(where, precision)
    loops = {
        "fast": with_runtime(request.config, "fast", precision),
        "plain": with_runtime(request.config, "plain", precision),
    }
    if precision == "bf16" and where.type == "cuda":
        # If launches are the limit, the plain loop is faster without autocast. The ratio is to the faster one.
        loops["plain tf32"] = with_runtime(request.config, "plain", "tf32")
    seconds: dict[str, Seconds] = {}
    # The load of a shared machine varies, so loops take turns. On a GPU each needs the memory for itself.
    for together in [[*loops]] if where.type == "cpu" else [[name] for name in loops]:
        started = {}
        for name in together:
            report(f"{request.config.recipe}, {name}")
            experiment = build_experiment(loops[name], data=data, accelerator=request.accelerator)
            started[name] = Loop(experiment, request.rounds if name == "fast" else 0)
        while [name for name in together if started[name].play_turn()]:
            pass
        for name in together:
            found[name], seconds[name] = started[name].measure()
            found[name]["share_of_ceiling"] = found[name]["tflops"] / ceiling
        del started, experiment
    # Rounds differ in their active devices, so only rounds that all loops have played are compared, if there are any.
    same = set.intersection(*map(set, seconds.values()))
    for name, own in seconds.items():
        found[name]["seconds_a_round_of_all"] = mean(own[key] for key in same or own)
    best = min(found[name]["seconds_a_round_of_all"] for name in loops if name != "fast")
    report("the side objective")
    return {
        **found,
        "ceiling_tflops": ceiling,
        "ratio": best / found["fast"]["seconds_a_round_of_all"],
        "side_objective": measure_side_objective(request, data),
    }


def load_or_draw_data(request: BenchmarkRequest) -> tuple[Data, bool]:
    """Loads the recipe's data, or draws random numbers of its shape. Returns the data, and whether it is real."""
    try:
        return sources.load_data(request.config.data, data_root(request.data_dir), request.config.seed), True
    except FedhenError:
        if request.config.data.name not in SHAPES:
            raise
    *shape, classes = SHAPES[request.config.data.name]
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (60000, *shape), dtype=torch.uint8, generator=draw).float().div_(255)
    y = torch.randint(0, classes, (60000,), generator=draw)
    limit = request.config.data.limit or 50000
    return Data(x[:limit], y[:limit], x[50000 : 50000 + limit], y[50000 : 50000 + limit], classes), False


def with_runtime(config: Config, engine: str, precision: str) -> Config:
    """Returns the configuration with that engine and precision."""
    runtime = replace(config.runtime, engine=engine, precision=precision)  # type: ignore[arg-type]
    return replace(config, runtime=runtime, rounds=10**6)


class Loop:
    """A loop to measure. Its first rounds are a warm-up that captures graphs, chooses kernels and scores models."""

    def __init__(self, experiment: Experiment, rounds: int) -> None:
        reset_peak_memory(experiment.population.data.device)
        self.experiment = experiment
        warm = experiment.config.evaluation.every + 1
        # The plain loop needs only one round to warm up. It starts later, so that both measure the same rounds.
        experiment.played = 0 if rounds else warm - 1
        self.left, self.seconds = (rounds, math.inf) if rounds else (PLAIN_ROUNDS, PLAIN_SECONDS)
        self.steps, self.play = list[Step](), experiment.play()
        self.first = self._step().timing["train"]
        while experiment.played < warm:
            self._step()
        if not any("distance" in step.record for step in self.steps):
            score_once(experiment)
        self.steps.clear()

    def play_turn(self) -> bool:
        """Plays for a turn. Returns whether there were rounds and seconds left."""
        end, before = time.perf_counter() + TURN_SECONDS, len(self.steps)
        while self.left and time.perf_counter() < end and (self.seconds > 0 or not self.steps):
            self.left -= 1
            self._step()
        return len(self.steps) > before

    def _step(self) -> Step:
        step = next(self.play)
        self.steps.append(step)
        self.seconds -= step.timing["total"]
        return step

    def measure(self) -> tuple[dict[str, Any], Seconds]:
        """Returns the measurements of the rounds after the warm-up, and the seconds of each round."""
        experiment, steps = self.experiment, self.steps
        train = mean(step.timing["train"] for step in steps)
        scoring = [step.timing["evaluate"] for step in steps if "distance" in step.record]
        evaluate = mean(scoring) if scoring else score_once(experiment)
        ends = [[(d, plan_ends(experiment, s, d)) for d in s.record["active"]] for s in steps]
        each = {tier: count_operations(experiment, tier) for tier in experiment.server}
        local = mean(sum(len(own) for _, own in round_) for round_ in ends)
        work = mean(sum(own[-1] * each[experiment.population.tier_of[d]] for d, own in round_) for round_ in ends)
        scored = evaluate / experiment.config.evaluation.every
        found = {
            "rounds": len(steps),
            "seconds_a_round": train + scored,
            "train": train,
            "evaluate_once": evaluate,
            "first_round": self.first,
            "steps_a_second": local / train,
            "tflops": work / train / 1e12,
            "peak_memory_mb": read_peak_memory(experiment.population.data.device) / 1e6,
        }
        each_round = {(s.record["round"], *s.record["active"]): s.timing["train"] + scored for s in steps}
        return found, each_round


def score_once(experiment: Experiment) -> float:
    """Scores all models. Returns the seconds that it took."""
    began = time.perf_counter()
    score_models(experiment.population, experiment.engine.score, experiment.models())
    return time.perf_counter() - began


def find_sequential(experiment: Experiment) -> SequentialDevices:
    """Returns the sequential devices that every engine has."""
    devices: Any = experiment.engine.devices
    found = devices if isinstance(devices, SequentialDevices) else devices.sequential
    assert isinstance(found, SequentialDevices)
    return found


def plan_ends(experiment: Experiment, step: Step, device: int) -> Sequence[int]:
    """Returns where the batches of a device end, one for each of its steps."""
    return [int(end) for end in find_sequential(experiment).plan_batches(step.record["round"], device).ends]


def count_operations(experiment: Experiment, tier: str) -> float:
    """Returns the floating-point operations of matrix products for one example, forward and backward."""
    population = experiment.population
    module = find_sequential(experiment).build_module(tier)
    return count_training_operations(module, population.objectives[tier], *population.data.sample())


def measure_side_objective(request: BenchmarkRequest, data: Data) -> dict[str, Any]:
    """Measures what the side objective costs a device of the largest tier: time and operations of a step, and bytes.

    It compares FedHeN with Decouple, whose largest model has only its last exit.
    """
    found: dict[str, Any] = {}
    for label, method in (("with", "fedhen"), ("without", "decouple")):
        config = replace(
            with_runtime(request.config, "fast", request.config.runtime.precision), method=method, method_file=""
        )
        experiment = build_experiment(config, data=data, accelerator=request.accelerator)
        tier = list(experiment.server)[-1]
        some = [d for d, t in enumerate(experiment.population.tier_of) if t == tier][: config.devices.active]
        sequential = find_sequential(experiment)
        trainings, times = time_trainings(experiment, some), list[float]()
        while len(times) < 3 or (len(times) < 12 and sum(times) < TIMING_SECONDS):
            times.append(next(trainings))
        count = sum(len(sequential.plan_batches(2, device).ends) for device in some)
        found[label] = {
            "milliseconds_a_step": 1e3 * min(times[1:]) / count,
            "gflop_an_example": count_operations(experiment, tier) / 1e9,
            "bytes_each_way": count_bytes(experiment.server[tier]),
        }
    return {**found, "ratio": {key: found["with"][key] / found["without"][key] for key in found["with"]}}


def time_trainings(experiment: Experiment, devices: Sequence[int]) -> Iterator[float]:
    """Trains these devices repeatedly. Yields the seconds that each training took."""
    sent = Sent(
        experiment.memories.starting_models(experiment.server, experiment.population.local), experiment.memories.mean
    )
    for number in range(1, 10**6):
        began = time.perf_counter()
        list(experiment.engine.devices.train(number, sent, devices))
        synchronise(experiment.population.data.device)
        yield time.perf_counter() - began
