"""Plans which model each class of a profile's devices trains, so that all finish in time.

Candidates are exits, widths, or the tiers of a family of the user's own. What each costs is measured with all of them
in place, which is the dearest case: deeper models may train the exits of shallower ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fedhen.algorithm.methods import Method
from fedhen.config.model_settings import ModelConfig
from fedhen.config.settings import Config
from fedhen.data.storage import data_root
from fedhen.devices.workload import measure_workload
from fedhen.errors import ConfigError
from fedhen.experiment.build import OwnParts, build_population, choose_data, fit_devices, start_experiment
from fedhen.experiment.recount import load_or_imitate
from fedhen.models.registry import FAMILIES
from fedhen.params import count_bytes
from fedhen.profiles.device_round import DeviceRound, Parts
from fedhen.profiles.profile import DeviceClass, Profile
from fedhen.wire.wire import count_down, count_up

RATES = (0.125, 0.25, 0.5, 1.0)
"""The widths that are tried."""


@dataclass(frozen=True)
class Candidate:
    """A model that a class of devices may train, and what a device does with it in a round."""

    tier: str
    parameters: int
    work: DeviceRound


@dataclass(frozen=True)
class Planned:
    """A class of devices and what it may train."""

    device_class: DeviceClass
    devices: int
    options: Sequence[Candidate]
    """All candidates, smallest first."""
    chosen: int
    """The place of the chosen one."""

    @property
    def candidate(self) -> Candidate:
        return self.options[self.chosen]

    def seconds(self, candidate: Candidate) -> Parts:
        return candidate.work.seconds(self.device_class)

    def joules(self, candidate: Candidate) -> Parts:
        return candidate.work.joules(self.device_class)


@dataclass(frozen=True)
class Plan:
    """Which class trains what, and the recipe that plays it."""

    config: Config
    profile: Profile
    """With the speeds that were planned with."""
    classes: Sequence[Planned]
    """Slowest first."""
    deadline: float
    """Seconds, given or found."""

    @cached_property
    def slowest(self) -> Planned:
        """The class that a round waits for."""
        return max(self.classes, key=lambda each: each.seconds(each.candidate).total)


def make_plan(
    config: Config,
    method: Method,
    profile: Profile,
    own: OwnParts,
    given: float | None,
    data_dir: Path | None = None,
) -> Plan:
    """Chooses for each class the largest candidate with which it meets the deadline in seconds.

    If none is given, the deadline is when the fastest class has trained the largest candidate, or the slowest class the
    smallest, whichever is later. A class never gets a larger candidate than a faster class.
    """
    if any(each.tier for each in profile.classes):
        raise ConfigError(
            f"profile {profile.name} gives its classes tiers, which a plan chooses: remove `tier` from its classes"
        )
    root = data_root(data_dir)
    data = load_or_imitate(config, root) if own.data is None else choose_data(own.data, config.data, root, config.seed)
    config, own = fit_devices(config, data), replace(own, data=data)
    wide = with_candidates(config, own)
    candidates = measure_candidates(wide, method, own)
    number = config.devices.number
    calibrated = profile.calibrate({each.tier: each.work.operations for each in candidates})
    counts = Counter(each.name for each in calibrated.assign(["any"] * number, ["any"], config.seed))
    found = [Planned(of, counts[of.name], candidates, 0) for of in calibrated.classes if counts[of.name]]
    smallest = max(each.seconds(candidates[0]).total for each in found)
    deadline = given or max(smallest, found[-1].seconds(candidates[-1]).total)
    chosen = choose_candidates(found, deadline)
    recipe = make_recipe(config, wide, profile, chosen, own)
    return Plan(recipe if given is None else add_deadline(recipe, given), calibrated, chosen, deadline)


def choose_candidates(classes: Sequence[Planned], deadline: float) -> list[Planned]:
    """Returns the classes with the largest candidates that meet the deadline; a ConfigError names those without any."""
    late, found, most = [], list[Planned](), len(classes[0].options) - 1
    for each in reversed(classes):
        able = [k for k, option in enumerate(each.options[: most + 1]) if each.seconds(option).total <= deadline]
        if able:
            most = max(able)
            found.append(replace(each, chosen=most))
        else:
            seconds = each.seconds(each.options[0]).total
            late.append(
                f"a {each.device_class.name} device takes {seconds:.4g} s for {each.options[0].tier}, "
                f"{seconds - deadline:.4g} s too long"
            )
    if late:
        raise ConfigError(f"a deadline of {deadline:g} s cannot be met: {'; '.join(late)}; raise it, or train less")
    return found[::-1]


def with_candidates(config: Config, own: OwnParts) -> Config:
    """Returns the configuration with a tier for each candidate."""
    if own.family is not None:
        return share_equally(config, own.family.tiers)
    model, exits, rates = config.model, dict(config.model.exits), dict(config.model.rates)
    if model.family not in FAMILIES:
        raise ConfigError(f"model.family={model.family} is your own: name it with --family")
    if model.nesting == "depth":
        stages = max(exits.values()) if model.family == "gpt" else len(model.widths)
        names = {stage: name for name, stage in exits.items()}
        exits = {names.get(stage, f"exit-{stage}"): stage for stage in range(1, stages + 1)}
        model = replace(model, exits=exits, rates=dict.fromkeys(exits, 1.0))
    elif model.nesting == "width":
        widths = {rate: name for name, rate in rates.items()}
        every = sorted({*RATES, *widths})
        model = replace(model, rates={widths.get(rate, f"width-{rate:g}"): rate for rate in every})
    return share_equally(replace(config, model=model), list_names(model))


def list_names(model: ModelConfig) -> Sequence[str]:
    """Returns the tiers of a named family."""
    return list(model.rates if model.nesting == "width" else model.exits)


def share_equally(config: Config, tiers: Sequence[str]) -> Config:
    """Returns the configuration with these tiers, each for as many devices, and with all devices in one round."""
    if config.devices.number < len(tiers):
        raise ConfigError(f"devices.number={config.devices.number}: a plan for {len(tiers)} candidates needs as many")
    return config.with_tiers(dict.fromkeys(tiers, 1 / len(tiers)))


def measure_candidates(config: Config, method: Method, own: OwnParts) -> list[Candidate]:
    """Counts what each tier's model costs in a round, on the device with most examples."""
    # Where the models' states are kept, and who is asked, makes no difference here.
    plain = replace(config, clock=type(config.clock)(), devices=replace(config.devices, sampling="uniform"))
    assert own.data is not None
    population = build_population(method.keep_tiers(plain), method, own.data, own.family, own.task, own.initial)
    lost = [tier for tier in config.tiers if tier not in population.config.tiers]
    if lost:
        raise ConfigError(f"method {method.name} has devices of one tier only: there is nothing to plan")
    workload = measure_workload(population)
    experiment = start_experiment(population)
    found = []
    for tier, weights in experiment.server.items():
        if tier not in workload.training_operations:
            raise ConfigError(f"the operations of the {tier} model cannot be counted")
        most = max(population.examples)
        operations = replace(workload, examples=[most]).count_round([tier], config.training)[0]
        kept = population.local.copies * count_bytes(experiment.memories.mean[tier])
        down, up = (count(population.wires[tier], weights) + kept for count in (count_down, count_up))
        found.append(Candidate(tier, experiment.parameters()[tier], DeviceRound(operations, down, up)))
    return found


def make_recipe(config: Config, wide: Config, profile: Profile, classes: Sequence[Planned], own: OwnParts) -> Config:
    """Returns the recipe in which each class trains its candidate."""
    devices = Counter[str]()
    for each in classes:
        devices[each.candidate.tier] += each.devices
    shares = {tier: number / config.devices.number for tier, number in devices.items()}
    planned = wide.with_tiers(shares)
    if own.family is None:
        planned = replace(planned, model=keep_candidates(wide.model, devices))
    clock = replace(config.clock, profile=config.clock.profile or profile.name)
    return replace(planned, recipe=f"{config.recipe}-on-{profile.name}", clock=clock)


def add_deadline(config: Config, seconds: float) -> Config:
    return replace(config, clock=replace(config.clock, deadline_seconds=seconds))


def keep_candidates(model: ModelConfig, chosen: Mapping[str, int]) -> ModelConfig:
    """Returns the model with the exits or widths of these tiers only, and the network's last exit."""
    names = list_names(model)
    kept = [name for name in names if name in chosen or (name == names[-1] and model.nesting != "width")]
    exits = model.exits if model.nesting == "width" else {name: model.exits[name] for name in kept}
    return replace(model, exits=exits, rates={name: model.rates[name] for name in kept})


def find_slow_end(plan: Plan) -> float:
    """Returns the seconds of a round if devices and links are as slow as the profile's sources allow."""
    return max(
        (each.candidate.work.seconds(each.device_class, bound="high").total for each in plan.classes), default=math.nan
    )
