"""Sizes, speeds and early exits of exported files as ratios of one measurement: python benchmarks/deployment.py RUN.

RUN is a run on the digits. The paper's networks have the weights that they start with: no claim of accuracy.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import nn

import fedhen
from fedhen.deploy.cascade import cut, run_stages
from fedhen.deploy.confidence import CONFIDENCES
from fedhen.deploy.export import export_models
from fedhen.deploy.runtime import Export, open_export
from fedhen.deploy.source import Source, TierModel
from fedhen.models.preact_resnet import Shape, preact_resnet
from fedhen.tasks.standard import Classification

Calls = Mapping[str, Callable[[], object]]


def measure(calls: Calls, turns: int, seconds: float) -> dict[str, float]:
    """Returns the median of the fastest call of each turn: all are measured in turns, on one thread."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            call()
            end, fastest = time.perf_counter() + seconds, float("inf")
            while time.perf_counter() < end:
                start = time.perf_counter()
                call()
                fastest = min(fastest, time.perf_counter() - start)
            found[name].append(fastest)
    return {name: median(times) for name, times in found.items()}


def list_calls(export: Export, module: nn.Module, tier: str, x: torch.Tensor, raw: np.ndarray) -> Calls:
    """Returns what is measured of a tier's model."""

    def eager() -> object:
        with torch.no_grad():
            return list(module(x))

    calls: dict[str, Callable[[], object]] = {"torch": eager}
    for name, int8 in (("onnx", False), ("int8", True)):
        session = export.open(export.choose_file(tier, int8=int8))
        calls[name] = lambda session=session: session({"input": raw})  # type: ignore[misc]
    return calls


def report(
    what: str,
    export: Export,
    tier: str,
    module: nn.Module,
    batches: Mapping[int, tuple[torch.Tensor, np.ndarray]],
    turns: int,
    seconds: float,
) -> None:
    whole, small = (export.choose_file(tier, int8=int8).bytes for int8 in (False, True))
    print(f"{what} {tier}: int8 has {small / whole:.2f} of the bytes of float ({whole:,})")
    for batch, (x, raw) in batches.items():
        times = measure(list_calls(export, module, tier, x, raw), turns, seconds)
        print(
            f"  batch {batch:3}: torch {1e6 * times['torch']:9.0f} µs, ONNX {times['torch'] / times['onnx']:.1f} "
            f"times as fast, int8 {times['onnx'] / times['int8']:.1f} times as fast as ONNX"
        )


def measure_digits(run: Path, folder: Path, turns: int, seconds: float) -> None:
    manifest = fedhen.export(run, folder / "digits", int8=True, threshold="auto", tolerance=100)
    export = open_export(folder / "digits")
    raw = np.random.default_rng(0).integers(0, 17, (100, 1, 8, 8)).astype(np.uint8)
    x = torch.from_numpy(raw).float() / 16
    for tier in ("simple", "complex"):
        module = fedhen.load(run, tier)
        report("digits", export, tier, module, {n: (x[:n], raw[:n]) for n in (1, 100)}, turns, seconds)
    for file in manifest.files:
        found, allowed = file.agreement.difference, file.agreement.tolerance
        print(f"  {file.name}: difference {found:.2g} (allowed in float: {allowed:.2g})")
    study = manifest.cascade.study if manifest.cascade else None
    if study is not None and study.held_out is not None:
        print(
            f"  cascade at {study.chosen:g}, on the other half: {study.held_out.score} with "
            f"{study.held_out.operations:.2f} of the operations; last exit {study.last_on_held_out}"
        )
    module = fedhen.load(run, "complex")
    _, stages = cut(module, x[:2])
    sure = CONFIDENCES["classification"]
    calls: Calls = {
        "whole": lambda: run_stages(stages, {"input": x[:1]}, 2.0, sure),
        "early": lambda: run_stages(stages, {"input": x[:1]}, 0.0, sure),
    }
    times = measure(calls, turns, seconds)
    print(f"  torch, batch 1: an early exit takes {times['early'] / times['whole']:.2f} of the time of the last")


def measure_paper(folder: Path, turns: int, seconds: float) -> None:
    family, x = preact_resnet(Shape()), torch.randn(100, 3, 32, 32)
    models = []
    torch.manual_seed(0)
    for tier in ("simple", "complex"):
        models.append(TierModel(tier, family.build(tier).eval(), family.exits(tier)))
    source = Source(models, Classification(), x[:2], training=x)
    export_models(source, folder / "paper", int8=True, tolerance=100)
    export = open_export(folder / "paper")
    for model in models:
        report("paper", export, model.tier, model.module, {1: (x[:1], x[:1].numpy())}, turns, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a finished run on the digits")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each turn of each file")
    parser.add_argument("--digits-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure_digits(options.run, Path(folder), options.turns, options.seconds)
        if not options.digits_only:
            measure_paper(Path(folder), options.turns, options.seconds)


if __name__ == "__main__":
    main()
