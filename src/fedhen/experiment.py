"""A configuration made runnable: data dealt, models nested and checked, rounds played, scored and recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhen import environment, seeds, toml
from fedhen.algorithm.holdings import Holding, holdings
from fedhen.algorithm.merging import Server
from fedhen.algorithm.methods import Method, method_named
from fedhen.config import Config, SplitConfig
from fedhen.data import partitions, sources
from fedhen.data.dataset import Data, Index
from fedhen.errors import UserError, unknown
from fedhen.evaluation import LastModels, accuracy
from fedhen.model_files import save_models
from fedhen.models.nesting import Family
from fedhen.models.preact_resnet import Shape, preact_resnet
from fedhen.params import count, distance, select, size
from fedhen.records import Recorder
from fedhen.rounds import Round, rounds, sampling
from fedhen.runtimes.plain import PlainDevices

OWN = "python"
"""The name that a configuration gives to a family or data brought in Python."""


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
    devices: PlainDevices

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
            "devices": {tier: self.last_models.average(tier) for tier in self.family.tiers},
        }

    def scores(self) -> dict[str, Any]:
        """Accuracy of every model, and R(w_s, w_c) of the server's."""
        deepest = self.server[self.family.deepest]
        return {
            "accuracy": {kind: self.score(models) for kind, models in self.models().items()},
            "distance": {tier: distance(self.server[tier], deepest) for tier in self.family.tiers[:-1]},
        }

    def score(self, models: Server) -> dict[str, float]:
        """Accuracy of each tier's model."""
        batch_size = self.config.evaluation.batch_size
        return {tier: accuracy(self.devices.module(tier), w, self.data, batch_size) for tier, w in models.items()}

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
) -> Experiment:
    """Make a configuration runnable; data, family and method, where not given, are the ones it names."""
    where = environment.accelerator(accelerator, config.runtime)
    method = method or method_named(config.method)
    data = data or sources.load(config.data.name, config.data.limit)
    if data.shards and len(data.shards) != config.devices.number:
        raise UserError(f"devices.number={config.devices.number}, but data is given for {len(data.shards)} devices")
    if not data.shards:
        data = data.split(deal(data, config.split, config.devices.number, config.seed))
    family = family or family_named(config, data)
    if tuple(config.tiers) != family.tiers:
        raise UserError(f"tiers names {', '.join(config.tiers)}, but the family has {', '.join(family.tiers)}")
    data = data.to(where)
    sample, labels = data.inputs(data.x[:2]), data.y[:2]
    family.check(sample.cpu(), data.classes)
    held = holdings(family, method, sample, labels)
    initial = {name: tensor.to(where) for name, tensor in family.initial(config.seed).items()}
    server = {tier: select(initial, holding.shapes) for tier, holding in held.items()}
    tier_of = [tier for tier, number in config.tier_sizes().items() for _ in range(number)]
    devices = PlainDevices(config, method, family, held, data, tier_of)
    return Experiment(config, method, family, data, held, tier_of, server, LastModels(server, tier_of), devices)


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


def family_named(config: Config, data: Data) -> Family:
    """The model family that a configuration names, for this data."""
    model = config.model
    if model.family == OWN:
        raise UserError(
            "the model family of this run was given in Python: give it again, with fedhen.train or fedhen.load"
        )
    if model.family != "preact-resnet":
        raise unknown("model family", model.family, ["preact-resnet"])
    if data.x.dim() != 4 or data.x.shape[2] != data.x.shape[3]:
        raise UserError(f"preact-resnet needs square images (n, channels, size, size), found {tuple(data.x.shape)}")
    shape = Shape(
        channels=data.x.shape[1],
        size=data.x.shape[2],
        classes=data.classes,
        widths=model.widths,
        blocks=model.blocks,
        strides=model.strides,
        exits=model.exits,
        groups=model.groups,
        exit_pool=model.exit_pool,
        exit_mix=model.exit_mix,
        final_norm=model.final_norm,
    )
    return preact_resnet(tuple(config.tiers), shape)


def play_into(folder: Path, experiment: Experiment) -> Iterator[Step]:
    """Play all rounds and leave a run folder behind."""
    began, steps = time.perf_counter(), []
    described = environment.describe(experiment.data.x.device)
    with Recorder(folder, toml.to_toml(experiment.config), described) as recorder:
        for step in experiment.play():
            recorder.round(step.record, step.timing)
            steps.append(step.record)
            yield step
        save_models(folder, experiment.models(), {t: h.exits for t, h in experiment.holdings.items()})
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
