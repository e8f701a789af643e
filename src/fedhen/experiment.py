"""A configuration made runnable: data dealt, models nested and checked, rounds played, scored and recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedhen import environment, seeds, toml
from fedhen.algorithm.holdings import Holding, holdings
from fedhen.algorithm.merging import Server
from fedhen.algorithm.methods import Method, method_named
from fedhen.config import OWN, Config, DataConfig, SplitConfig
from fedhen.data import partitions, sources
from fedhen.data.dataset import Data, Index
from fedhen.data.storage import data_root
from fedhen.errors import UserError, unknown
from fedhen.evaluation import LastModels, accuracy
from fedhen.model_files import save_models
from fedhen.models.nesting import Family, load_weights
from fedhen.models.preact_resnet import Shape, preact_resnet
from fedhen.params import count, distance, select, size
from fedhen.records import Recorder
from fedhen.rounds import Devices, Round, rounds, sampling
from fedhen.runtimes.plain import PlainDevices


@dataclass
class Experiment:
    """Everything a run needs, checked, with the state it has reached."""

    config: Config
    method: Method
    family: Family
    data: Data
    holdings: Mapping[str, Holding]
    tier_of: list[str]
    server: Server
    last_models: LastModels
    devices: Devices
    modules: dict[str, nn.Module]
    """One of each tier, to score weights in."""

    def play(self) -> Iterator[Step]:
        """Play all rounds; each step is what the next line of the run folder says."""
        steps = rounds(
            self.server,
            self.method,
            self.devices,
            sampling(self.config.devices, self.config.seed),
            rule=self.config.server,
            numbers=range(1, self.config.rounds + 1),
        )
        began = time.perf_counter()
        for done in steps:
            self.server = done.server
            self.last_models.take(done.updates)
            trained = time.perf_counter()
            scores = self.scores() if self.is_evaluated(done.number) else {}
            ended = time.perf_counter()
            timing = {"train": trained - began, "evaluate": ended - trained, "total": ended - began}
            yield Step({**self.record(done), **scores}, {name: round(s, 6) for name, s in timing.items()})
            began = time.perf_counter()

    def is_evaluated(self, number: int) -> bool:
        """Every few rounds, and after the last one."""
        return number % self.config.evaluation.every == 0 or number == self.config.rounds

    def models(self) -> dict[str, Server]:
        """The models that are scored and saved: the server's, and the average of all devices' last ones."""
        return {
            "server": self.server,
            "devices": {tier: self.last_models.average(tier) for tier in self.server},
        }

    def scores(self) -> dict[str, Any]:
        """Accuracy of every model, and R(w_s, w_c) of the server's."""
        *shallower, deepest = self.server
        return {
            "accuracy": {kind: self.score(models) for kind, models in self.models().items()},
            "distance": {tier: distance(self.server[tier], self.server[deepest]) for tier in shallower},
        }

    def score(self, models: Server) -> dict[str, float]:
        """Accuracy of each tier's model."""
        scores = {}
        for tier, weights in models.items():
            load_weights(self.modules[tier], weights)
            scores[tier] = accuracy(self.modules[tier], self.data, self.config.evaluation.batch_size)
        return scores

    def record(self, done: Round) -> dict[str, Any]:
        """What the seed determines about a round."""
        sent = {t: size(w) * sum(self.tier_of[d] == t for d in done.active) for t, w in done.server.items()}
        return {
            "round": done.number,
            "active": done.active,
            "dropped": done.dropped,
            "loss": done.loss,
            "bytes": {"down": sent, "up": sent},
        }

    def about_models(self) -> dict[str, dict[str, Any]]:
        """What a model file says of each tier's model beside its weights."""
        inputs = {"inputs": list(self.data.shape), "classes": self.data.classes}
        return {tier: {"exits": list(holding.exits), **inputs} for tier, holding in self.holdings.items()}

    def parameters(self) -> dict[str, int]:
        """How many numbers the model of each tier is."""
        return {tier: count(weights) for tier, weights in self.server.items()}


@dataclass(frozen=True)
class Step:
    """One round played: its line in `rounds.jsonl` and in `timing.jsonl`."""

    record: dict[str, Any]
    timing: dict[str, float]


def assemble(
    config: Config,
    *,
    data: Data | None = None,
    family: Family | None = None,
    method: Method | None = None,
    accelerator: str = "auto",
    data_dir: Path | None = None,
) -> Experiment:
    """Make a configuration runnable; data, family and method, where not given, are the ones it names."""
    where = environment.accelerator(accelerator, config.runtime)
    method = method or method_named(config.method)
    data = data or sources.load(config.data, data_root(data_dir), config.seed)
    if data.shards and len(data.shards) != config.devices.number:
        raise UserError(f"devices.number={config.devices.number}, but data is given for {len(data.shards)} devices")
    if not data.shards:
        data = data.split(deal(data, config.split, config.devices.number, config.seed))
    family = family or family_named(config, data.shape, data.classes)
    tiers = tuple(config.tiers)
    if tiers != tuple(tier for tier in family.tiers if tier in tiers):
        raise UserError(f"tiers names {', '.join(tiers)}, but the family has, in this order, {', '.join(family.tiers)}")
    data = data.to(where).in_type_of(family.build(tiers[-1]))
    if config.data.augmentation != "none" and len(data.shape) != 3:
        raise UserError(
            f"data.augmentation={config.data.augmentation} needs images, found inputs of shape {data.shape}"
        )
    sample, labels = data.inputs(data.x[:2]), data.y[:2]
    family.check(sample.cpu(), data.classes)
    held = holdings(family, tiers, method, (sample, labels))
    initial = {name: tensor.to(where) for name, tensor in family.initial(config.seed).items()}
    server = {tier: select(initial, holding.shapes) for tier, holding in held.items()}
    tier_of = [tier for tier, number in config.tier_sizes().items() for _ in range(number)]
    return Experiment(
        config=config,
        method=method,
        family=family,
        data=data,
        holdings=held,
        tier_of=tier_of,
        server=server,
        last_models=LastModels(server, tier_of),
        devices=PlainDevices(config, method, family, held, data, tier_of),
        modules={tier: family.build(tier).to(where) for tier in tiers},
    )


def assemble_all(
    configs: Sequence[Config], *, accelerator: str = "auto", data_dir: Path | None = None
) -> list[Experiment]:
    """Make several configurations runnable; those on the same data share it."""
    loaded: list[tuple[DataConfig, int, Data]] = []
    experiments = []
    for config in configs:
        # Which images a fraction keeps depends on the seed.
        seed = config.seed if config.data.fraction < 1 else 0
        data = next((d for c, s, d in loaded if (c, s) == (config.data, seed)), None)
        if data is None:
            where = environment.accelerator(accelerator, config.runtime)
            data = sources.load(config.data, data_root(data_dir), config.seed).to(where)
            loaded.append((config.data, seed, data))
        experiments.append(assemble(config, data=data, accelerator=accelerator))
    return experiments


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
    )
    return preact_resnet(shape)


def play_into(folder: Path, experiment: Experiment) -> Iterator[Step]:
    """Play all rounds and leave a run folder behind."""
    began, steps = time.perf_counter(), []
    described = environment.describe(experiment.data.x.device)
    with Recorder(folder, toml.to_toml(experiment.config), described) as recorder:
        for step in experiment.play():
            recorder.round(step.record, step.timing)
            steps.append(step.record)
            yield step
        save_models(folder, experiment.models(), experiment.about_models())
        recorder.finish(summary(experiment, steps, time.perf_counter() - began))


def summary(experiment: Experiment, records: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The end of a run in a few numbers."""
    config, scored = experiment.config, [r["accuracy"] for r in records if "accuracy" in r]
    best = {kind: {tier: max(s[kind][tier] for s in scored) for tier in tiers} for kind, tiers in scored[-1].items()}
    return {
        "recipe": config.recipe,
        "method": config.method,
        "seed": config.seed,
        "rounds": config.rounds,
        "parameters": experiment.parameters(),
        "final": scored[-1],
        "best": best,
        "dropped": sum(len(r["dropped"]) for r in records),
        "bytes": sum(n for r in records for way in r["bytes"].values() for n in way.values()),
        "seconds": round(seconds, 3),
    }
