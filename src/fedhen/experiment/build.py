"""Builds an experiment: resolves what a configuration names, then sets up the state before the first round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from fedhen.algorithm.merging import Memories
from fedhen.algorithm.methods import Method, load_method
from fedhen.algorithm.sampling import Activate
from fedhen.algorithm.server_optimizers import make_server_optimizer
from fedhen.config.data_settings import OWN, DataConfig
from fedhen.config.settings import Config
from fedhen.config.validation import from_mapping
from fedhen.data import sources
from fedhen.data.dataset import Data
from fedhen.data.inputs import list_tensors
from fedhen.data.partitions import deal, deal_tests, hold_out
from fedhen.data.storage import data_root
from fedhen.devices.clock import make_clock
from fedhen.devices.personal_choice import choose_held_out
from fedhen.devices.population import Population, assign_tiers, check_task, compute_omega, make_population
from fedhen.devices.roster import ConstantRoster, Roster
from fedhen.devices.state_store import make_stores
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.engines.clocked import ClockedDevices
from fedhen.engines.engine import Engine, EngineParts, choose_engine, make_scoring_module
from fedhen.engines.scoring import Scoring
from fedhen.engines.sequential import SequentialDevices
from fedhen.errors import ConfigError
from fedhen.experiment.experiment import Experiment
from fedhen.experiment.reported_models import AllDevicesAverage, NoReportedModels, ReportedModels
from fedhen.hardware.accelerator import choose_device
from fedhen.models.family import Family
from fedhen.models.model_files import read_initial_weights
from fedhen.models.registry import make_family
from fedhen.params import TierModels, count_bytes, pack, select
from fedhen.privacy.attacks import apply_attack, flip_labels
from fedhen.privacy.choose import choose_sampler, make_mechanism
from fedhen.privacy.refusals import check_promise
from fedhen.privacy.silence import silence
from fedhen.seeds import RunStreams
from fedhen.tasks import Task
from fedhen.tasks.registry import TASKS, describe_task, make_task


def build_experiment(
    config: Config,
    *,
    data: Data | None = None,
    family: Family | None = None,
    method: Method | None = None,
    task: Task | None = None,
    activate: Activate | None = None,
    accelerator: str = "auto",
    data_dir: Path | None = None,
    ranks: Ranks = ALONE,
    secret: bytes = b"",
) -> Experiment:
    """Builds the experiment of a configuration. Data, family and method are loaded by name unless they are given."""
    where = choose_device(accelerator)
    population = build_population(
        config,
        method or load_method(config.method_file or config.method),
        choose_data(data, config.data, data_root(data_dir), config.seed).to(where),
        family,
        task,
        secret=secret,
    )
    return start_experiment(population, activate=activate, ranks=ranks)


@dataclass(frozen=True)
class OwnParts:
    """What is given instead of being named by the configuration."""

    family: Family | None = None
    data: Data | None = None
    task: Task | None = None
    initial: Mapping[str, Tensor] | None = None
    """Weights to start from."""
    secret: bytes = b""
    """The secret from which the random streams of server and devices follow; empty: they follow from the seed."""


def build_populations(
    chosen: Iterable[tuple[Config, Method]],
    accelerator: str,
    data_dir: Path | None,
    own: OwnParts | None = None,
    fit: bool = False,
) -> Iterator[Population]:
    """Yields the population of each configuration. Those with the same data share it in memory.

    With `fit`, data that comes split decides the number of devices.
    """
    where, root, own = choose_device(accelerator), data_root(data_dir), own or OwnParts()

    @cache
    def load(data: DataConfig, seed: int) -> Data:
        return choose_data(own.data, data, root, seed).to(where)

    for config, method in chosen:
        # Only if the seed decides which examples there are is the data loaded for each seed.
        data = load(config.data, config.seed if sources.is_drawn(config.data) else 0)
        fitted = fit_devices(config, data) if fit else config
        yield build_population(fitted, method, data, own.family, own.task, own.initial, own.secret)


def choose_data(given: Data | None, config: DataConfig, root: Path, seed: int) -> Data:
    """Returns the given data, or loads that which the configuration names."""
    if given is None:
        return sources.load_data(config, root, seed)
    return sources.select_examples(given, config, seed)


def fit_devices(config: Config, data: Data) -> Config:
    """Returns the configuration with as many devices as the data is split over. At most all of them are active."""
    if not (number := len(data.shards)):
        return config
    return replace(config, devices=replace(config.devices, number=number, active=min(config.devices.active, number)))


def build_population(
    config: Config,
    method: Method,
    data: Data,
    family: Family | None = None,
    task: Task | None = None,
    initial: Mapping[str, Tensor] | None = None,
    secret: bytes = b"",
) -> Population:
    """Deals the data to the devices, builds the model family, and checks that all of it fits together.

    With a secret, the random streams of server and devices follow from it in place of the seed. How the data is dealt
    does not.
    """
    if task is not None:
        check_named_task(task, config)
    task = task or make_task(config.task)
    check_task(task, data, config)
    if len(data.shards) > 1 and config.devices.number == 1:
        # A single device holds all the data, however it came split: the centralised reference.
        data = data.split([np.sort(np.concatenate(data.shards))])
    if data.shards and len(data.shards) != config.devices.number:
        raise ConfigError(
            f"devices.number={config.devices.number}, but data is given for {len(data.shards)} devices: they must agree"
        )
    data, validation = hold_out(data, config.evaluation.validation, config.seed)
    if data.shards:
        config = replace(config, split=replace(config.split, kind="natural"))
    else:
        data = data.split(deal(data, config.split, config.devices.number, config.seed))
    if config.evaluation.own:
        data = give_tests(data, config.seed)
    outputs = task.count_outputs(torch.cat([data.y, data.y_test]), data.classes)
    family = family or make_family(config, data.shape, outputs)
    if initial is not None:
        family = family.start_from(initial)
    elif config.model.initial not in ("", OWN):
        family = family.start_from(read_initial_weights(Path(config.model.initial)))
    elif config.model.initial == OWN and not family.start:
        raise ConfigError("the initial weights of this run were passed from Python: pass them again, as initial=...")
    tier_of = assign_tiers(config)
    data = flip_labels(config.attack, data, tier_of)
    examples = [len(shard) for shard in data.shards]
    held_out = choose_held_out(config, tier_of)
    omega = compute_omega(examples, tier_of, method.pools(tuple(config.tiers)), held_out)
    return make_population(
        config,
        family,
        method,
        data,
        tier_of=tier_of,
        omega=omega,
        examples=examples,
        task=task,
        outputs=outputs,
        validation=validation,
        streams=RunStreams(secret or config.seed),
    )


def give_tests(data: Data, seed: int) -> Data:
    """Returns the data with test data for each device: as it came split, or else dealt."""
    if not len(data.y_test):
        raise ConfigError("evaluation.own scores models on each device's test data, and there is no test data")
    return data if data.test_shards else data.split(data.shards, deal_tests(data, seed))


def check_named_task(task: Task, config: Config) -> None:
    """Raises a FedhenError if a task is not the one that the configuration names."""
    found, named = describe_task(task), config.task.name
    ours = found["name"] != OWN
    if ours != (named in TASKS) or (ours and from_mapping({"task": found}, config).task != config.task):
        raise ConfigError(f"the run's task is {named!r}, and another one was passed: {task.name!r}")


def start_experiment(
    population: Population,
    *,
    activate: Activate | None = None,
    ranks: Ranks = ALONE,
    engine: Callable[[EngineParts], Engine] = choose_engine,
    is_fleet: bool = False,
    roster: Callable[[Population], Roster] = ConstantRoster,
) -> Experiment:
    """Sets up the state before the first round: initial models, memories, stores, and the engine.

    A fleet brings its own engine and sampler, and the noise of its differential privacy can never be computed again.
    """
    config, data, streams = population.config, population.data, population.run_streams
    own_sampler = activate is not None and not is_fleet
    check_promise(config, population.family, own_sampler=own_sampler, is_fleet=is_fleet)
    where, sizes = data.device, population.tier_sizes
    initial = {name: tensor.to(where) for name, tensor in population.family.initial(streams.initial).items()}
    server = {tier: select(initial, holding.shapes) for tier, holding in population.holdings.items()}
    fixed = {tier: select(initial, holding.fixed) for tier, holding in population.holdings.items()}
    population = replace(population, fixed=fixed).place_unsent(initial)
    mean = make_empty_memories(server, population)
    check_ranks_agree(config, data, {**server, **{f"fixed {tier}": w for tier, w in fixed.items()}}, ranks)
    states = {tier: population.state_like(tier, weights) for tier, weights in server.items()}
    kept = [server, states] if config.evaluation.devices else [states]
    needed = sum(sizes[tier] * count_bytes(models[tier]) for models in kept for tier in sizes)
    make_store = make_stores(config.runtime, where, needed)
    memory = make_store()
    modules = {tier: make_scoring_module(population, tier) for tier in sizes}
    scoring = Scoring(
        modules, data, population.task, config.evaluation.batch_size, population.precision, population.validation
    )
    last_models: ReportedModels = NoReportedModels()
    if config.evaluation.devices:
        last_models = AllDevicesAverage(server, population.tier_of, make_store(), ranks, population.held_out)
    optimizer = make_server_optimizer(config.server)
    chosen = engine(EngineParts(SequentialDevices(population, memory), scoring, server, mean, ranks))
    devices = silence(config, apply_attack(config.attack, chosen.devices, population.tier_of, config.seed))
    clock = make_clock(population, server, mean)
    return Experiment(
        population=population,
        engine=replace(chosen, devices=devices if clock is None else ClockedDevices(devices, clock)),
        activate=activate
        or choose_sampler(
            config, population.tier_of, streams.root, population.held_out, clock.timetable if clock else None
        ),
        server=server,
        memories=Memories(mean, sizes),
        last_models=last_models,
        mechanism=make_mechanism(population, server, ranks, is_fleet=is_fleet),
        optimizer=optimizer,
        moments=optimizer.start(server, {t: holding.learned for t, holding in population.holdings.items()}),
        memory=memory,
        ranks=ranks,
        roster=roster(population),
    )


def check_ranks_agree(config: Config, data: Data, server: TierModels, ranks: Ranks) -> None:
    """Refuses ranks that were given different settings, data or models."""
    if ranks.number == 1:
        return
    seen = crc32(repr(config).encode())
    inputs = [tensor for each in (data.x, data.x_test) for tensor in list_tensors(each)]
    for tensor in (*inputs, data.y, data.y_test, *(pack(w) for w in server.values())):
        seen = crc32(tensor.cpu().contiguous().view(torch.uint8).numpy().data, seen) if tensor.numel() else seen
    for shard in data.shards:
        seen = crc32(shard.data, seen)
    if len(set(ranks.gather(seen))) > 1:
        raise ConfigError("the ranks have different settings, data or models: seed all random choices of your script")


def make_empty_memories(server: TierModels, population: Population) -> TierModels:
    """Returns the mean of the memories before the first round: zeros for the trained weights, if there are memories."""
    if population.local.remember is None:
        return {tier: {} for tier in server}
    return {
        tier: {n: torch.zeros_like(t) for n, t in population.select_learned(tier, weights).items()}
        for tier, weights in server.items()
    }
