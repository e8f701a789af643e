"""A configuration made runnable: data dealt, models nested and checked, devices set up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import torch

from fedhen import seeds
from fedhen.algorithm.local_variants import LocalVariant, make_local_variant
from fedhen.algorithm.merging import Memories
from fedhen.algorithm.methods import Method, load_method
from fedhen.algorithm.objectives import configure_objective
from fedhen.algorithm.ownership import Holding, find_holdings
from fedhen.algorithm.sampling import Activate, make_sampler
from fedhen.config.settings import Config, DataConfig
from fedhen.data import sources
from fedhen.data.dataset import Data
from fedhen.data.partitions import deal
from fedhen.data.storage import data_root
from fedhen.devices.population import Population, assign_tiers, compute_omega
from fedhen.devices.state_store import make_stores
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.engines.engine import Engine, EngineParts, choose_engine, make_scoring_module
from fedhen.engines.scoring import Scoring
from fedhen.engines.sequential import SequentialDevices
from fedhen.errors import UserError, unknown_name
from fedhen.experiment.experiment import Experiment
from fedhen.experiment.reported_models import AllDevicesAverage, NoReportedModels
from fedhen.hardware.accelerator import choose_device
from fedhen.hardware.precision import choose_precision
from fedhen.models.family import Family
from fedhen.models.registry import make_family
from fedhen.params import TierModels, count_bytes, pack, select


def build_experiment(
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
    where = choose_device(accelerator)
    method = method or load_method(config.method_file or config.method)
    data = data or sources.load_data(config.data, data_root(data_dir), config.seed)
    if not len(data.y_test):
        raise UserError("test data: there are no examples")
    if data.shards and len(data.shards) != config.devices.number:
        raise UserError(f"devices.number={config.devices.number}, but data is given for {len(data.shards)} devices")
    if not data.shards:
        data = data.split(deal(data, config.split, config.devices.number, config.seed))
    family = family or make_family(config, data.shape, data.classes)
    tier_of = assign_tiers(config)
    omega = compute_omega([len(shard) for shard in data.shards], tier_of, method.pools(tuple(config.tiers)))
    fleet = build_population(config, family, method, data.to(where), tier_of=tier_of, omega=omega)
    return start_experiment(fleet, method, activate=activate, ranks=ranks)


def build_population(
    config: Config,
    family: Family,
    method: Method,
    data: Data,
    *,
    tier_of: Sequence[str],
    omega: Sequence[float],
    first: int = 0,
    checked: bool = False,
) -> Population:
    """What devices of these tiers have, hold and minimise; the data lies where they train.

    A family that was checked elsewhere, as by the server of a fleet, need not be checked again.
    """
    tiers = tuple(config.tiers)
    if tiers != tuple(tier for tier in family.tiers if tier in tiers):
        raise UserError(f"tiers names {', '.join(tiers)}, but the family has, in this order, {', '.join(family.tiers)}")
    if config.server.rows_by_class and not family.outputs:
        raise UserError("server.rows_by_class needs a family that names its outputs: Family(..., outputs=...)")
    with seeds.randomness(config.seed, "initial weights"):
        data = data.in_type_of(family.build(tiers[-1]))
    if config.data.augmentation != "none" and len(data.shape) != 3:
        raise UserError(
            f"data.augmentation={config.data.augmentation} needs images, found inputs of shape {data.shape}"
        )
    batch = data.inputs(data.x[:2]), data.y[:2]
    if not checked:
        family.check(batch[0].cpu(), data.classes)
    for name in config.objective.exit_weights:
        if name not in family.tiers:
            raise unknown_name("exit in objective.exit_weights", name, family.tiers)
    objectives = {tier: configure_objective(method.objective, family.exits(tier), config.objective) for tier in tiers}
    held = find_holdings(family, objectives, method.pools, batch)
    precision = choose_precision(config.runtime.precision, data.x.device)
    return Population(
        config, family, data, tier_of, held, objectives, make_local_variant(config.local), omega, precision, first=first
    )


def start_experiment(
    fleet: Population,
    method: Method,
    *,
    activate: Activate | None = None,
    ranks: Ranks = ALONE,
    engine: Callable[[EngineParts], Engine] | None = None,
) -> Experiment:
    """The experiment that a fleet plays, its devices trained by the engine that is given, or that is configured."""
    config, family, data, held, local = fleet.config, fleet.family, fleet.data, fleet.holdings, fleet.local
    where, sizes = data.x.device, config.tier_sizes()
    initial = {name: tensor.to(where) for name, tensor in family.initial(config.seed).items()}
    server = {tier: select(initial, holding.shapes) for tier, holding in held.items()}
    forgotten = make_empty_memories(server, held, local)
    kept = [server, forgotten] if config.evaluation.devices else [forgotten]
    check_ranks_agree(config, data, server, ranks)
    shelf = make_stores(
        config.runtime, where, sum(sizes[tier] * count_bytes(each[tier]) for each in kept for tier in sizes)
    )
    memory, tier_of = shelf(), list(fleet.tier_of)
    scoring = Scoring(
        {t: make_scoring_module(fleet, t) for t in sizes}, data, config.evaluation.batch_size, fleet.precision
    )
    start = EngineParts(SequentialDevices(fleet, memory), scoring, server, forgotten, ranks)
    chosen = (engine or choose_engine)(start)
    return Experiment(
        config=config,
        method=method,
        family=family,
        data=data,
        holdings=held,
        tier_of=tier_of,
        local=local,
        activate=activate or make_sampler(config.devices, config.seed),
        server=server,
        memories=Memories(forgotten, sizes),
        last_models=AllDevicesAverage(server, tier_of, shelf(), ranks)
        if config.evaluation.devices
        else NoReportedModels(),
        precision=fleet.precision,
        devices=chosen.devices,
        score=chosen.score,
        workers=chosen.workers,
        memory=memory,
        ranks=ranks,
    )


def check_ranks_agree(config: Config, data: Data, server: TierModels, ranks: Ranks) -> None:
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


def make_empty_memories(server: TierModels, held: Mapping[str, Holding], local: LocalVariant) -> TierModels:
    """The mean of the memories before the first round: zeros for the trained weights, if there is a memory at all."""
    if local.remember is None:
        return {tier: {} for tier in server}
    return {
        tier: {n: torch.zeros_like(t) for n, t in weights.items() if n in held[tier].learned}
        for tier, weights in server.items()
    }


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
            where = choose_device(self.accelerator)
            data = sources.load_data(config.data, data_root(self.data_dir), config.seed).to(where)
            self.loaded.append((config.data, seed, data))
        return build_experiment(config, data=data, accelerator=self.accelerator, ranks=self.ranks)
