"""The clock of a simulation: how long each device takes by a profile, and which answers come too late."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fedhen.algorithm.timetable import Timetable
from fedhen.config.settings import Config
from fedhen.devices.population import Population
from fedhen.devices.workload import measure_workload
from fedhen.errors import ConfigError
from fedhen.params import TierModels, count_bytes
from fedhen.profiles.device_round import DeviceRound
from fedhen.profiles.profile import DeviceClass, draw_jitter, drops_out, is_there
from fedhen.profiles.reading import read_profile
from fedhen.profiles.waiting import Waiting
from fedhen.wire.wire import count_down, count_up

DROPPED_OUT = "it dropped out"
TOO_LATE = "it had not answered when the round ended (clock.deadline_seconds, clock.spare_devices)"


@dataclass(frozen=True)
class Clock:
    """The time that the devices of a simulation take."""

    classes: Sequence[DeviceClass]
    """The class of each device."""
    work: Sequence[DeviceRound]
    """What each device does in a round."""
    examples: Sequence[int]
    waiting: Waiting
    seed: int

    @cached_property
    def seconds(self) -> list[float]:
        """What each device's round takes without jitter."""
        return [work.seconds(of).total for work, of in zip(self.work, self.classes, strict=True)]

    @property
    def timetable(self) -> Timetable:
        return Timetable(self.seconds, self.examples, self.list_there, self.waiting.deadline)

    def list_there(self, number: int) -> set[int]:
        """Returns the devices that can be asked in a round."""
        return {device for device, of in enumerate(self.classes) if is_there(of, self.seed, number, device)}

    def find_late(self, number: int, active: Sequence[int]) -> dict[int, str]:
        """Returns each active device whose answer does not arrive in time, with the reason."""
        seconds = {d: self.seconds[d] * draw_jitter(self.classes[d], self.seed, number, d) for d in active}
        gone = {device for device in active if drops_out(self.classes[device], self.seed, number, device)}
        answered = {*self.waiting.end(seconds, gone).answered}
        return {d: DROPPED_OUT if d in gone else TOO_LATE for d in active if d not in answered}


def make_clock(population: Population, server: TierModels, mean: TierModels) -> Clock | None:
    """Makes the clock of a run's profile; None if it has no profile. `mean` is that of the devices' memories."""
    config, tier_of = population.config, population.tier_of
    if not config.clock.profile:
        return None
    profile, workload = read_profile(config.clock.profile), measure_workload(population)
    profile.check_tiers(list(server))
    if lost := [tier for tier in server if tier not in workload.training_operations]:
        raise ConfigError(
            f"clock.profile: the operations of the {', '.join(lost)} model cannot be counted: leave it out"
        )
    operations, copies = workload.count_round(tier_of, config.training), population.local.copies
    sent = {
        tier: [
            count(population.wires[tier], weights) + copies * count_bytes(mean[tier])
            for count in (count_down, count_up)
        ]
        for tier, weights in server.items()
    }
    clock = Clock(
        classes=profile.choose_classes(tier_of, list(server), operations, config.seed),
        work=[DeviceRound(number, *sent[tier]) for number, tier in zip(operations, tier_of, strict=True)],
        examples=workload.count_examples(tier_of),
        waiting=Waiting(config.clock.deadline_seconds or math.inf, config.clock.spare_devices),
        seed=config.seed,
    )
    check_deadline(clock, population.tier_of, config.tiers)
    return clock


def check_deadline(clock: Clock, tier_of: Sequence[str], tiers: Mapping[str, float]) -> None:
    """Raises a ConfigError if no device of a tier can meet the deadline."""
    found = []
    for tier in tiers:
        seconds, device = min((clock.seconds[d], d) for d, own in enumerate(tier_of) if own == tier)
        if seconds > clock.waiting.deadline and not clock.classes[device].jitter:
            over = seconds - clock.waiting.deadline
            fastest = f"the fastest (of class {clock.classes[device].name}) takes {seconds:.4g} s"
            found.append(f"no {tier} device meets it, {fastest}, {over:.4g} s too long")
    if found:
        raise ConfigError(f"clock.deadline_seconds={clock.waiting.deadline:g}: {'; '.join(found)}; raise it")


def name_profile(config: Config) -> Config:
    """Returns the configuration with the whole path of its profile, if that is a file, to be read from any folder."""
    if not config.clock.profile.endswith(".toml"):
        return config
    return replace(config, clock=replace(config.clock, profile=str(Path(config.clock.profile).resolve())))
