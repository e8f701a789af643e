"""Chooses the engine of a run, which trains its devices and scores its models."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fedhen.algorithm.personal import Personal
from fedhen.algorithm.rounds import Devices
from fedhen.config.training_settings import TrainingConfig
from fedhen.devices.population import Population
from fedhen.distributed.communicator import Ranks
from fedhen.engines.coded import CodedDevices
from fedhen.engines.own_models import OwnModels, ScoreOwn
from fedhen.engines.parallel import ParallelDevices
from fedhen.engines.scoring import Score, Scoring
from fedhen.engines.sequential import SequentialDevices
from fedhen.engines.sharded import ShardedDevices
from fedhen.engines.worker_pool import can_fork
from fedhen.errors import ConfigError
from fedhen.hardware.threads import worker_count
from fedhen.params import TierModels


@dataclass(frozen=True)
class EngineParts:
    """What engines are built from."""

    plain: SequentialDevices
    scoring: Scoring
    server: TierModels
    mean: TierModels
    ranks: Ranks


def refuse_to_grow(population: Population) -> None:
    """The engines that plan for all devices before the first round: only fleets have devices that join later."""
    raise ConfigError("devices can only join with runtime.engine=plain")


@dataclass(frozen=True)
class Engine:
    """Trains devices and scores models. `workers` are the processes to stop after the last round."""

    devices: Devices
    score: Score
    score_own: ScoreOwn
    workers: AbstractContextManager[object] = field(default_factory=nullcontext)
    admit: Callable[[Population], None] = refuse_to_grow
    """Takes the population of the next round if devices have joined."""


def choose_engine(start: EngineParts) -> Engine:
    """Returns the configured engine. With several ranks, it trains the devices of this rank."""
    plain, runtime = start.plain, start.plain.population.config.runtime
    engine = make_plain_engine(start) if runtime.engine == "plain" else choose_fast_engine(start)
    if start.ranks.number > 1:
        engine = replace(engine, devices=ShardedDevices(engine.devices, plain.population, plain.memory, start.ranks))
    if plain.population.config.wire.codes:
        engine = replace(engine, devices=CodedDevices(engine.devices, plain.population))
    return engine


def make_plain_engine(start: EngineParts) -> Engine:
    """Returns the engine that trains and scores one after the other."""
    return Engine(start.plain, start.scoring, OwnModels(start.plain, start.scoring).score, admit=start.plain.admit)


def choose_fast_engine(start: EngineParts) -> Engine:
    """Returns the fast engine for the device that holds the data."""
    plain, number = start.plain, worker_count(start.plain.population.config.runtime)
    own = OwnModels(plain, start.scoring)
    if plain.population.data.device.type != "cuda":
        if number > 1 and not can_fork():
            fix = "hide the GPU with CUDA_VISIBLE_DEVICES=" if sys.platform == "linux" else "use Linux"
            warnings.warn(f"one worker trains all devices: to use more, {fix}", stacklevel=2)
            number = 1
        if number == 1:
            return make_plain_engine(start)
        parallel = ParallelDevices(plain, start.scoring, start.server, start.mean, number)
        return Engine(parallel, parallel.score, own.score, parallel.workers)
    if reason := why_no_kernels(plain.population.config.training, plain.population.personal):
        warnings.warn(f"the GPU engine {reason}: devices train one by one", stacklevel=2)
        return make_plain_engine(start)
    from fedhen.engines.cuda.graphs import GraphDevices

    return Engine(GraphDevices(plain), start.scoring, own.score)


def why_no_kernels(training: TrainingConfig, personal: Personal) -> str:
    """Returns why the GPU engine's kernels cannot train with these settings, or nothing if they can."""
    reasons = {
        f"has no kernel for personal.name={personal.name}": not personal.trains_plainly,
        f"has no kernel for training.optimizer={training.optimizer}": training.optimizer != "sgd",
        "has no kernel for training.optimizer_state=device": training.optimizer_state == "device",
        "needs Triton, which is not installed": not has_triton(),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def has_triton() -> bool:
    """Returns whether the kernels of the GPU engine can be compiled."""
    return importlib.util.find_spec("triton") is not None


def make_scoring_module(population: Population, tier: str) -> nn.Module:
    """Returns a module of a tier in the form that is fastest to score on the device that holds the data."""
    module = SequentialDevices(population).build_module(tier).eval()
    if population.config.runtime.engine == "plain" or population.data.device.type != "cuda" or not has_triton():
        return module
    from fedhen.engines.cuda.fusing import fuse

    found = fuse(module, population.data.sample()[0], tier)
    # A module that was not rewritten may depend on the memory layout of its images, so it keeps it.
    return module if found is module else found.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
