"""Chooses what is trained: a configuration and its method, from a recipe or a file, and what the user changes in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedhen.algorithm.methods import Method, load_method
from fedhen.config.data_settings import OWN
from fedhen.config.devices_settings import DevicesConfig
from fedhen.config.personal_settings import SETTINGS
from fedhen.config.recipes import RECIPES, read_recipe_file
from fedhen.config.settings import Config
from fedhen.config.validation import are_counts, from_mapping
from fedhen.devices.clock import name_profile
from fedhen.errors import ConfigError
from fedhen.experiment.build import OwnParts, fit_devices
from fedhen.fileio.python_files import is_reference, resolve_reference
from fedhen.tasks.registry import describe_task

Change = Callable[[Config], Config]
Load = Callable[[str], Method]


class Choice(NamedTuple):
    """A configuration and its method."""

    config: Config
    method: Method


class Job(NamedTuple):
    """A configuration to train."""

    name: str
    folder: str
    """The name of its folder below the parent folder of all jobs; "" is the parent itself."""
    config: Config
    method: Method


def unchanged(config: Config) -> Config:
    return config


def choose(
    source: Config | Path,
    method: str | Method | None,
    change: Change,
    *,
    start: Change = unchanged,
    prepare: Change = unchanged,
    load: Load = load_method,
) -> Choice:
    """Returns the configuration of `configure`, with only the tiers that its method's devices have."""
    config = configure(source, method, change, start=start, prepare=prepare, load=load)
    chosen = method if isinstance(method, Method) else load(config.method_file or config.method)
    return Choice(chosen.keep_tiers(config), chosen)


def configure(
    source: Config | Path,
    method: str | Method | None,
    change: Change,
    *,
    start: Change = unchanged,
    prepare: Change = unchanged,
    load: Load = load_method,
) -> Config:
    """Returns a recipe, or the configuration in a file, with the settings of a method and the user's changes.

    A setting comes from `change`, else from `method`, else from the file, else from the recipe, which `start` fits to
    the user's own family and data. `prepare` may turn all that but the last two into another experiment.
    """

    def begin(recipe: Config) -> Config:
        return take_method(start(recipe), recipe.method_file or recipe.method, load)

    config = prepare(read_recipe_file(source, begin) if isinstance(source, Path) else start(source))
    config = config if method is None else take_method(config, method, load)
    chosen = change(config)
    if (personal := chosen.personal.name) == config.personal.name:
        return name_profile(chosen)
    # What makes models personal changes settings too, and the user's changes take precedence.
    return name_profile(change(from_mapping(SETTINGS[personal], config)))


def take_method(config: Config, method: str | Method, load: Load = load_method) -> Config:
    """Returns the configuration with a method and what the method itself sets."""
    file = resolve_reference(method) if isinstance(method, str) and is_reference(method) else ""
    found = method if isinstance(method, Method) else load(file or method)
    return from_mapping({**found.settings(config), "method": found.name, "method_file": file}, config)


def fit_own_parts(config: Config, own: OwnParts) -> Config:
    """Returns a recipe with the tiers of the user's own family, and the devices of the user's own data."""
    if own.family is not None:
        tiers = own.family.tiers
        fitting = tuple(config.tiers) == tuple(tier for tier in tiers if tier in config.tiers)
        # Without a recipe, tiers that are not the default are the user's.
        if not fitting if config.recipe in RECIPES else config.tiers == Config().tiers:
            config = config.with_tiers({tier: 1 / len(tiers) for tier in tiers})
    return config if own.data is None else fit_devices(config, own.data)


def name_own_parts(config: Config, own: OwnParts) -> Config:
    """Returns the configuration with the name of what was passed from Python in place of other names."""
    if own.family is not None:
        config = replace(config, model=replace(config.model, family=OWN))
    if own.initial is not None:
        config = replace(config, model=replace(config.model, initial=OWN))
    if own.data is not None and config.data.name != OWN:
        config = replace(config, data=replace(config.data, name=OWN))
        if config.recipe in RECIPES:
            # Other data make it another experiment.
            data = replace(config.data, limit=0)
            config = replace(config, recipe=f"{config.recipe}-on-own-data", data=data, targets={})
    return config if own.task is None else from_mapping({"task": describe_task(own.task)}, config)


def names_devices(settings: Mapping[str, Any]) -> bool:
    """Returns whether settings say how many devices there are, which data that comes split decides otherwise."""
    tiers, devices = settings.get("tiers"), settings.get("devices")
    if isinstance(devices, DevicesConfig):
        return devices.number != DevicesConfig().number
    return (
        isinstance(tiers, list | tuple) or are_counts(tiers) or (isinstance(devices, Mapping) and "number" in devices)
    )


def plan_comparison(by_method: Sequence[Choice], seeds: Sequence[int] | None) -> list[Job]:
    """Returns a job for each method and, if any are given, each seed; seed by seed."""
    if len({choice.config.method for choice in by_method}) < len(by_method):
        raise ConfigError("two of the methods have the same name: rename one of them")
    jobs = []
    for seed in [None] if seeds is None else sorted(seeds):
        for config, method in by_method:
            named = f"{config.method}-seed{seed}" if seed is not None else config.method
            config = config if seed is None else replace(config, seed=seed)
            jobs.append(Job(named.replace("-seed", " seed "), named, config, method))
    return jobs
