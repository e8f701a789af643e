"""What cannot be combined with a mechanism, because its promise would not hold. Server and nodes check it."""

from __future__ import annotations

from collections.abc import Iterator

from fedhen.config.personal_settings import OWN_SCORES_ONLY
from fedhen.config.settings import Config
from fedhen.errors import ConfigError
from fedhen.models.family import Family

AT_RANDOM = ("bernoulli",)
"""Samplings in which devices take part independently of each other, which makes ε smaller."""
SAMPLINGS = ("uniform", "by-tier", *AT_RANDOM)
"""Samplings that do not depend on any device's data. A sampling that is added later is refused until it is here."""


def check_promise(config: Config, family: Family, *, own_sampler: bool = False, is_fleet: bool = False) -> None:
    """Raises a ConfigError that names everything that breaks the promise of the run's mechanism."""
    if found := refusals(config, family, own_sampler=own_sampler, is_fleet=is_fleet):
        raise ConfigError(f"privacy.mechanism={config.privacy.mechanism} does not allow this: {'; '.join(found)}")


def refusals(config: Config, family: Family, *, own_sampler: bool = False, is_fleet: bool = False) -> list[str]:
    """Returns why a run cannot keep what its mechanism promises, a line for each reason; empty if it can.

    Args:
        config: The settings.
        family: The models.
        own_sampler: Whether `activate` was passed from Python.
        is_fleet: Whether a real fleet plays the run.
    """
    if config.privacy.mechanism != "central" and config.privacy.noise:
        return ["it adds no noise: set privacy.mechanism=central, or privacy.noise=0"]
    if config.privacy.mechanism == "none":
        return []
    found = list(_of_memories(config))
    if config.privacy.mechanism == "bounded":
        return found
    found += [
        *_of_settings(config),
        *_of_releases(config),
        *_of_personal_models(config),
        *_of_participation(config, own_sampler, is_fleet),
    ]
    if family.average_buffers:
        found.append("layers that store data statistics, such as BatchNorm, count a device's examples: use GroupNorm")
    return found


def _of_memories(config: Config) -> Iterator[str]:
    if config.local.name in ("scaffold", "feddyn"):
        yield f"local.name={config.local.name} keeps a memory on the server that has no bound: set local.name=plain"


def _of_settings(config: Config) -> Iterator[str]:
    if not config.privacy.bound:
        yield "the median of a round's norms depends on data: set privacy.bound"
    if config.privacy.budget and not config.privacy.noise:
        yield "without noise ε is infinite: set privacy.noise"
    if config.server.weighting == "samples":
        yield "a device's weight would depend on its data: set server.weighting=plain"
    if config.wire.up == "topk":
        yield "wire.up=topk lets changes of earlier rounds into a later one: choose bf16 or int8"
    if config.server.rows_by_class:
        yield "which rows count tells which classes a device has: set server.rows_by_class=false"


def _of_releases(config: Config) -> Iterator[str]:
    if config.evaluation.devices:
        yield "the all-devices average has the models of single devices: set evaluation.devices=false"
    if config.evaluation.validation:
        yield "held-out training examples are the devices' data: set evaluation.validation=0"
    if config.evaluation.own:
        yield "scores on devices' own test data tell of that data: set evaluation.own=false"


def _of_personal_models(config: Config) -> Iterator[str]:
    if config.personal.name in OWN_SCORES_ONLY:
        yield (
            f"personal.name={config.personal.name} is scored with devices' own models on their own data: choose "
            "finetune, fedbabu, ditto or perfedavg, with evaluation.own=false"
        )
    if config.devices.held_out:
        yield "the account counts all devices as taking part: set devices.held_out=0"


def _of_participation(config: Config, own_sampler: bool, is_fleet: bool) -> Iterator[str]:
    sampling, separation = config.devices.sampling, config.privacy.separation
    if own_sampler:
        yield "an own `activate` may depend on data: leave it out"
    if sampling not in SAMPLINGS:
        yield f"devices.sampling={sampling} depends on data or on answers: choose from {', '.join(SAMPLINGS)}"
    if config.clock.profile:
        yield "who answers in time depends on how many examples a device has: leave clock.profile empty"
    if separation > 1 and sampling != "uniform":
        yield "privacy.separation needs devices.sampling=uniform"
    if separation > 1 and config.devices.active * separation > config.devices.number:
        yield (
            f"{config.devices.active} active devices in each of {separation} rounds need at least "
            f"{config.devices.active * separation} devices: lower privacy.separation or devices.active"
        )
    if is_fleet and (config.fleet.answers or config.fleet.spare_devices):
        yield (
            "the first answers would end a round, and how fast a device answers depends on its data: "
            "set fleet.answers=0 and fleet.spare_devices=0"
        )
    if is_fleet and config.fleet.losses:
        yield "a device's loss tells of its data: set fleet.losses=false"
    if is_fleet and sampling in AT_RANDOM:
        yield "nobody can promise that phones take part at random: set devices.sampling=uniform and privacy.separation"
