"""A configuration made runnable: data dealt, models nested and checked, devices set up."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from zlib import crc32

import torch
from torch import nn

from fedhen import environment, seeds
from fedhen.algorithm.holdings import Holding, holdings
from fedhen.algorithm.local import Local, local_named
from fedhen.algorithm.merging import Memories, Server
from fedhen.algorithm.methods import Method, method_named
from fedhen.algorithm.objectives import configured
from fedhen.config import OWN, Config, DataConfig, SplitConfig
from fedhen.cores import workers
from fedhen.data import partitions, sources
from fedhen.data.dataset import Data, Index
from fedhen.data.storage import data_root
from fedhen.errors import UserError, unknown
from fedhen.evaluation import LastModels, NothingKept, Score, Scoring
from fedhen.experiment import Experiment
from fedhen.models.nesting import Family
from fedhen.models.preact_resnet import Shape, preact_resnet
from fedhen.params import pack, select, size
from fedhen.precision import precision_named
from fedhen.ranks import ALONE, Ranks
from fedhen.rounds import Activate, Devices, sampling
from fedhen.runtimes.parallel import ParallelDevices
from fedhen.runtimes.plain import Fleet, PlainDevices
from fedhen.runtimes.shared import SharedDevices
from fedhen.shelf import shelves
from fedhen.workers import can_fork


def assemble(
    config: Config,
    *,
    data: Data | None = None,
    family: Family | None = None,
    method: Method | None = None,
    activate: Activate | None = None,
    accelerator: str = "auto",
    data_dir: Path | None = None,
    ranks: Ranks = ALONE,
) -> Experiment:
    """Make a configuration runnable; what is not given is what it names."""
    where = environment.device_named(accelerator)
    method = method or method_named(config.method_file or config.method)
    data = data or sources.load(config.data, data_root(data_dir), config.seed)
    if not len(data.y_test):
        raise UserError("test data: there are no examples")
    if data.shards and len(data.shards) != config.devices.number:
        raise UserError(f"devices.number={config.devices.number}, but data is given for {len(data.shards)} devices")
    if not data.shards:
        data = data.split(deal(data, config.split, config.devices.number, config.seed))
    family = family or family_named(config, data.shape, data.classes)
    tier_of = tiers_of(config)
    omega = shares([len(shard) for shard in data.shards], tier_of, method.pools(tuple(config.tiers)))
    fleet = fleet_of(config, family, method, data.to(where), tier_of=tier_of, omega=omega)
    return experiment_of(fleet, method, activate=activate, ranks=ranks)


def tiers_of(config: Config) -> list[str]:
    """The tier of every device."""
    return [tier for tier, number in config.tier_sizes().items() for _ in range(number)]


def fleet_of(
    config: Config,
    family: Family,
    method: Method,
    data: Data,
    *,
    tier_of: Sequence[str],
    omega: Sequence[float],
    first: int = 0,
    checked: bool = False,
) -> Fleet:
    """What devices of these tiers have, hold and minimise; the data lies where they train.

    A family that was checked elsewhere, as by the server of a fleet, need not be checked again.
    """
    tiers = tuple(config.tiers)
    if tiers != tuple(tier for tier in family.tiers if tier in tiers):
        raise UserError(f"tiers names {', '.join(tiers)}, but the family has, in this order, {', '.join(family.tiers)}")
    if config.server.label_rows and not family.outputs:
        raise UserError("server.label_rows needs a family that names its outputs: Family(..., outputs=...)")
    with seeds.randomness(config.seed, "initial weights"):
        data = data.in_type_of(family.build(tiers[-1]))
    if config.data.augmentation != "none" and len(data.shape) != 3:
        raise UserError(
            f"data.augmentation={config.data.augmentation} needs images, found inputs of shape {data.shape}"
        )
    batch = data.inputs(data.x[:2]), data.y[:2]
    if not checked:
        family.check(batch[0].cpu(), data.classes)
    for name in config.objective.weights:
        if name not in family.tiers:
            raise unknown("exit in objective.weights", name, family.tiers)
    objectives = {tier: configured(method.objective, family.exits(tier), config.objective) for tier in tiers}
    held = holdings(family, objectives, method.pools, batch)
    precision = precision_named(config.runtime.precision, data.x.device)
    return Fleet(
        config, family, data, tier_of, held, objectives, local_named(config.local), omega, precision, first=first
    )


def experiment_of(
    fleet: Fleet,
    method: Method,
    *,
    activate: Activate | None = None,
    ranks: Ranks = ALONE,
    engine: Callable[[Start], Engine] | None = None,
) -> Experiment:
    """The experiment that a fleet plays, its devices trained by the engine that is given, or that is configured."""
    config, family, data, held, local = fleet.config, fleet.family, fleet.data, fleet.holdings, fleet.local
    where, sizes = data.x.device, config.tier_sizes()
    initial = {name: tensor.to(where) for name, tensor in family.initial(config.seed).items()}
    server = {tier: select(initial, holding.shapes) for tier, holding in held.items()}
    forgotten = nothing_remembered(server, held, local)
    kept = [server, forgotten] if config.evaluation.devices else [forgotten]
    check_alike(config, data, server, ranks)
    shelf = shelves(config.runtime, where, sum(sizes[tier] * size(each[tier]) for each in kept for tier in sizes))
    memory, tier_of = shelf(), list(fleet.tier_of)
    scoring = Scoring({t: to_score(fleet, t) for t in sizes}, data, config.evaluation.batch_size, fleet.precision)
    start = Start(PlainDevices(fleet, memory), scoring, server, forgotten, ranks)
    chosen = (engine or engine_of)(start)
    return Experiment(
        config=config,
        method=method,
        family=family,
        data=data,
        holdings=held,
        tier_of=tier_of,
        local=local,
        activate=activate or sampling(config.devices, config.seed),
        server=server,
        memories=Memories(forgotten, sizes),
        last_models=LastModels(server, tier_of, shelf(), ranks) if config.evaluation.devices else NothingKept(),
        precision=fleet.precision,
        devices=chosen.devices,
        score=chosen.score,
        workers=chosen.workers,
        memory=memory,
        ranks=ranks,
    )


@dataclass(frozen=True)
class Start:
    """What engines are made of."""

    plain: PlainDevices
    scoring: Scoring
    server: Server
    mean: Server
    ranks: Ranks


@dataclass(frozen=True)
class Engine:
    """Who trains devices and scores models, and the processes that must be ended with the rounds."""

    devices: Devices
    score: Score
    workers: AbstractContextManager[object] = field(default_factory=nullcontext)


def engine_of(start: Start) -> Engine:
    """The engine that is configured, on every rank."""
    plain, runtime = start.plain, start.plain.fleet.config.runtime
    engine = Engine(plain, start.scoring) if runtime.engine == "plain" else fastest(start)
    if start.ranks.number == 1:
        return engine
    return replace(engine, devices=SharedDevices(engine.devices, plain.fleet, plain.memory, start.ranks))


def fastest(start: Start) -> Engine:
    """The fast engine of where the data lies."""
    plain, number = start.plain, workers(start.plain.fleet.config.runtime)
    if not plain.fleet.data.x.is_cuda:
        if number > 1 and not can_fork():
            fix = "hide the GPU with CUDA_VISIBLE_DEVICES=" if sys.platform == "linux" else "use Linux"
            warnings.warn(f"one worker trains all devices: for more, {fix}", stacklevel=2)
            number = 1
        if number == 1:
            return Engine(plain, start.scoring)
        parallel = ParallelDevices(plain, start.scoring, start.server, start.mean, number)
        return Engine(parallel, parallel.score, parallel.workers)
    if not has_triton():
        warnings.warn("the GPU engine needs Triton, which is not installed: devices train one by one", stacklevel=2)
        return Engine(plain, start.scoring)
    from fedhen.runtimes.gpu.graphs import GraphDevices

    return Engine(GraphDevices(plain), start.scoring)


def has_triton() -> bool:
    """Whether the GPU engine's kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None


def check_alike(config: Config, data: Data, server: Server, ranks: Ranks) -> None:
    """Refuse ranks that were not given the same, as where a script draws its data without a seed."""
    if ranks.number == 1:
        return
    seen = crc32(repr(config).encode())
    for tensor in (data.x, data.y, data.x_test, data.y_test, *(pack(w) for w in server.values())):
        seen = crc32(tensor.cpu().contiguous().view(torch.uint8).numpy().data, seen)
    for shard in data.shards:
        seen = crc32(shard.data, seen)
    if len(set(ranks.gather(seen))) > 1:
        raise UserError("the ranks have different settings, data or models: seed all that your script draws")


def to_score(fleet: Fleet, tier: str) -> nn.Module:
    """A module of that tier, in the form that scores fastest where the data lies."""
    module = PlainDevices(fleet).new_module(tier).eval()
    if fleet.config.runtime.engine == "plain" or not fleet.data.x.is_cuda or not has_triton():
        return module
    from fedhen.runtimes.gpu.fusing import fused

    found = fused(module, fleet.data.inputs(fleet.data.x_test[:2]), tier)
    # A module of its own making may count on how its images lie.
    return module if found is module else found.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def nothing_remembered(server: Server, held: Mapping[str, Holding], local: Local) -> Server:
    """The mean of the memories before the first round: zeros for the trained weights, if there is a memory at all."""
    if local.remember is None:
        return {tier: {} for tier in server}
    return {
        tier: {n: torch.zeros_like(t) for n, t in weights.items() if n in held[tier].learned}
        for tier, weights in server.items()
    }


def shares(sizes: Sequence[int], tier_of: Sequence[str], pools: Sequence[tuple[str, ...]]) -> list[float]:
    """ω_i = n_i·N/n of every device, N and n over the devices of its pool."""
    omega = [1.0] * len(sizes)
    for pool in pools:
        members = [device for device, tier in enumerate(tier_of) if tier in pool]
        total = sum(sizes[device] for device in members)
        for device in members:
            omega[device] = sizes[device] * len(members) / total
    return omega


@dataclass
class Assembler:
    """Makes several configurations runnable; those on the same data share it."""

    accelerator: str = "auto"
    data_dir: Path | None = None
    ranks: Ranks = ALONE
    loaded: list[tuple[DataConfig, int, Data]] = field(default_factory=list)

    def __call__(self, config: Config) -> Experiment:
        """The experiment of one configuration."""
        # Which images a fraction keeps depends on the seed.
        seed = config.seed if config.data.fraction < 1 else 0
        data = next((d for c, s, d in self.loaded if (c, s) == (config.data, seed)), None)
        if data is None:
            where = environment.device_named(self.accelerator)
            data = sources.load(config.data, data_root(self.data_dir), config.seed).to(where)
            self.loaded.append((config.data, seed, data))
        return assemble(config, data=data, accelerator=self.accelerator, ranks=self.ranks)


def deal(data: Data, split: SplitConfig, devices: int, seed: int) -> list[Index]:
    """Deal the training data to the devices."""
    labels, rng = data.y.cpu().numpy(), seeds.stream(seed, "split")
    if len(labels) < devices:
        raise UserError(f"{len(labels)} training examples cannot be dealt to {devices} devices: lower devices.number")
    if split.kind == "iid":
        return partitions.iid(labels, devices, rng)
    if split.kind == "dirichlet":
        return partitions.dirichlet(labels, devices, rng, split.alpha)
    return partitions.dirichlet_by_class(labels, devices, rng, split.alpha, split.minimum)


def family_named(config: Config, inputs: tuple[int, ...], classes: int) -> Family:
    """The model family that a configuration names, for inputs of that shape."""
    model = config.model
    if model.family == OWN:
        raise UserError("the model family of this run was given in Python: give it again from Python, as family=...")
    if model.family != "preact-resnet":
        raise unknown("model family", model.family, ["preact-resnet"])
    if len(inputs) != 3 or inputs[1] != inputs[2]:
        raise UserError(f"preact-resnet needs square images (channels, size, size), found inputs of shape {inputs}")
    shape = Shape(
        channels=inputs[0],
        size=inputs[1],
        classes=classes,
        widths=model.widths,
        blocks=model.blocks,
        strides=model.strides,
        exits=model.exits,
        groups=model.groups,
        exit_pool=model.exit_pool,
        exit_mix=model.exit_mix,
        final_norm=model.final_norm,
        nesting=model.nesting,
        rates=model.rates,
        scaler=model.scaler,
    )
    return preact_resnet(shape)
