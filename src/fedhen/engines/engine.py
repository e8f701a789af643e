"""The engine of a run: what trains its devices and scores its models, chosen once."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fedhen.algorithm.rounds import Devices
from fedhen.config.settings import TrainingConfig
from fedhen.devices.population import Population
from fedhen.distributed.communicator import Ranks
from fedhen.engines.parallel import ParallelDevices
from fedhen.engines.scoring import Score, Scoring
from fedhen.engines.sequential import SequentialDevices
from fedhen.engines.sharded import ShardedDevices
from fedhen.engines.worker_pool import can_fork
from fedhen.hardware.threads import worker_count
from fedhen.params import TierModels


@dataclass(frozen=True)
class EngineParts:
    """What engines are made of."""

    plain: SequentialDevices
    scoring: Scoring
    server: TierModels
    mean: TierModels
    ranks: Ranks


@dataclass(frozen=True)
class Engine:
    """Who trains devices and scores models, and the processes that must be ended with the rounds."""

    devices: Devices
    score: Score
    workers: AbstractContextManager[object] = field(default_factory=nullcontext)


def choose_engine(start: EngineParts) -> Engine:
    """The engine that is configured, on every rank."""
    plain, runtime = start.plain, start.plain.population.config.runtime
    engine = Engine(plain, start.scoring) if runtime.engine == "plain" else choose_fast_engine(start)
    if start.ranks.number == 1:
        return engine
    return replace(engine, devices=ShardedDevices(engine.devices, plain.population, plain.memory, start.ranks))


def choose_fast_engine(start: EngineParts) -> Engine:
    """The fast engine of where the data lies."""
    plain, number = start.plain, worker_count(start.plain.population.config.runtime)
    if not plain.population.data.x.is_cuda:
        if number > 1 and not can_fork():
            fix = "hide the GPU with CUDA_VISIBLE_DEVICES=" if sys.platform == "linux" else "use Linux"
            warnings.warn(f"one worker trains all devices: for more, {fix}", stacklevel=2)
            number = 1
        if number == 1:
            return Engine(plain, start.scoring)
        parallel = ParallelDevices(plain, start.scoring, start.server, start.mean, number)
        return Engine(parallel, parallel.score, parallel.workers)
    if reason := why_no_kernels(plain.population.config.training):
        warnings.warn(f"the GPU engine {reason}: devices train one by one", stacklevel=2)
        return Engine(plain, start.scoring)
    from fedhen.engines.cuda.graphs import GraphDevices

    return Engine(GraphDevices(plain), start.scoring)


def why_no_kernels(training: TrainingConfig) -> str:
    """Returns why the GPU engine's kernels cannot train with these settings, or nothing if they can."""
    reasons = {
        f"has no kernel for training.optimizer={training.optimizer}": training.optimizer != "sgd",
        "has no kernel for training.optimizer_state=device": training.optimizer_state == "device",
        "needs Triton, which is not installed": not has_triton(),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def has_triton() -> bool:
    """Whether the GPU engine's kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None


def make_scoring_module(fleet: Population, tier: str) -> nn.Module:
    """A module of that tier, in the form that scores fastest where the data lies."""
    module = SequentialDevices(fleet).build_module(tier).eval()
    if fleet.config.runtime.engine == "plain" or not fleet.data.x.is_cuda or not has_triton():
        return module
    from fedhen.engines.cuda.fusing import fuse

    found = fuse(module, fleet.data.inputs(fleet.data.x_test[:2]), tier)
    # A module of its own making may count on how its images lie.
    return module if found is module else found.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
