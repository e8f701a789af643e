"""Measures where a local step spends its time on a GPU, by class of kernel: the plain loop and the fast engine.

    python benchmarks/kernels.py [RECIPE]

Random images replace data that is not on the machine. Kernels are timed one after the other.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from fedhen.algorithm.rounds import Sent
from fedhen.benchmark import BenchmarkRequest, load_or_draw_data, with_runtime
from fedhen.config.recipes import load_recipe
from fedhen.engines.cuda.graphs import GraphDevices
from fedhen.experiment.build import build_experiment
from fedhen.experiment.experiment import Experiment

CLASSES = {
    "update": r"multi_tensor|_update|_squares|_clip",
    "norm and ReLU": r"_norm_relu|[Gg]roup_?[Nn]orm|RowwiseMoments|GammaBeta|ComputeInternal|Compute1d|clamp|threshold",
    "convolution, linear": r"xmma|cutlass|conv|gemm|dgrad|wgrad|_weight_gradient|_columns|nhwc|nchw|Padding|splitK",
    "pooling": r"pool",
    "sums of parts": r"_sum_rows",
    "everything else": r"",
}


def kernel_class(name: str) -> str:
    return next(label for label, pattern in CLASSES.items() if re.search(pattern, name))


def measure_by_class(work: Callable[[], int]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the microseconds and launches of each class in a step. `work` returns the number of its steps."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        steps = work()
        torch.cuda.synchronize()
    times, launches = (defaultdict[str, float](float) for _ in range(2))
    for event in found.events() or ():
        if event.device_type.name == "CUDA":
            times[kernel_class(event.name)] += event.device_time / steps
            launches[kernel_class(event.name)] += 1 / steps
    return times, launches


def make_work(experiment: Experiment, tier: str) -> Callable[[], int]:
    """Returns a function that trains one device of a tier and returns the number of its steps."""
    device = experiment.population.tier_of.index(tier)
    devices = experiment.engine.devices
    sequential = devices.sequential if isinstance(devices, GraphDevices) else devices
    sent = Sent(experiment.server, experiment.memories.mean)

    def work() -> int:
        list(devices.train(1, sent, [device]))
        return len(sequential.plan_batches(1, device).ends)  # type: ignore[attr-defined]

    return work


def main() -> None:
    """Prints the table."""
    config = load_recipe(sys.argv[1] if len(sys.argv) > 1 else "cifar10-iid")
    data, _ = load_or_draw_data(BenchmarkRequest(config, 1))
    loops = {
        name: build_experiment(with_runtime(config, engine, precision), data=data, accelerator="cuda")
        for name, engine, precision in (
            ("plain tf32", "plain", "tf32"),
            ("plain bf16", "plain", "bf16"),
            ("fast bf16", "fast", "bf16"),
        )
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds (launches) a step")
    for tier in config.tiers:
        found = {name: measure_by_class(make_work(experiment, tier)) for name, experiment in loops.items()}
        print(f"\n{tier:22}" + "".join(f"{name:>20}" for name in found))
        for label in CLASSES:
            cells = [f"{times[label]:.0f} ({launches[label]:.0f})" for times, launches in found.values()]
            print(f"{label:22}" + "".join(f"{cell:>20}" for cell in cells))
        sums = [f"{sum(times.values()):.0f} ({sum(launches.values()):.0f})" for times, launches in found.values()]
        print(f"{'all':22}" + "".join(f"{cell:>20}" for cell in sums))


if __name__ == "__main__":
    main()
