"""A profile: the classes of the devices of a fleet, and which device is of which class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean

from fedhen import seeds
from fedhen.errors import ConfigError
from fedhen.profiles.quantity import ZERO, Quantity


@dataclass(frozen=True)
class DeviceClass:
    """Devices that are equally fast and have equal links."""

    name: str
    share: float
    """Of all devices."""
    speed: Quantity
    """Operations of training in a second."""
    joules: Quantity
    """Joules an operation of training."""
    down: Quantity
    """Bytes a second from the server."""
    up: Quantity
    """Bytes a second to the server."""
    down_joules: Quantity
    """Joules a byte from the server."""
    up_joules: Quantity
    """Joules a byte to the server."""
    idle_power: Quantity = ZERO
    """Watts while a device waits for the slowest device of its round."""
    tier: str = ""
    """The tier of its devices; empty in profiles that leave the tiers to the order of the classes."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of a device-round's duration."""
    availability: float = 1.0
    """Probability that a device can be asked in a round."""
    dropout: float = 0.0
    """Probability that a device that was asked does not answer."""


@dataclass(frozen=True)
class Calibration:
    """One measured number: a device of this class trained the tier's model for one round in so many seconds."""

    device_class: str
    tier: str
    seconds: float


@dataclass(frozen=True)
class Profile:
    """The classes of a fleet's devices."""

    name: str
    about: str
    classes: tuple[DeviceClass, ...]
    """Slowest first."""
    calibration: Calibration | None = None

    def assign(self, tier_of: Sequence[str], tiers: Sequence[str], seed: int) -> list[DeviceClass]:
        """Returns the class of every device, given the tier of every device and the tiers, shallowest first.

        A profile whose classes name their tiers gives each tier's devices the classes of that tier, in proportion to
        their shares. Otherwise the slowest devices have the shallowest tier: devices, ordered by tier, are cut into
        classes, ordered by speed. Within a tier the seed decides.
        """
        self.check_tiers(tiers)
        found: dict[int, DeviceClass] = {}
        ordered = {tier: _shuffle([d for d, own in enumerate(tier_of) if own == tier], seed, tier) for tier in tiers}
        if any(each.tier for each in self.classes):
            for tier, members in ordered.items():
                found |= _deal(members, [each for each in self.classes if each.tier == tier])
        else:
            found |= _deal([device for members in ordered.values() for device in members], self.classes)
        return [found[device] for device in range(len(tier_of))]

    def choose_classes(
        self, tier_of: Sequence[str], tiers: Sequence[str], operations: Sequence[float], seed: int
    ) -> list[DeviceClass]:
        """Returns the class of every device, calibrated by the operations of each device in a round."""
        each = list(zip(tier_of, operations, strict=True))
        means = {tier: mean(number for own, number in each if own == tier) for tier in tiers}
        return self.calibrate(means).assign(tier_of, tiers, seed)

    def check_tiers(self, tiers: Sequence[str]) -> None:
        """Raises a ConfigError if the profile has no class for one of the tiers."""
        known = dict.fromkeys(each.tier for each in self.classes if each.tier)
        for tier in tiers:
            if known and tier not in known:
                raise ConfigError(
                    f"profile {self.name} has no class of tier {tier!r}, only of {', '.join(known)}: add a class of it"
                )

    def calibrate(self, operations: Mapping[str, float]) -> Profile:
        """Returns the profile with speeds that fit its measured number. Without one, returns it unchanged.

        `operations` are those of a device-round of each tier. All speeds are multiplied by one factor, and the joules
        an operation divided by it: a network that is computed faster takes no more power.
        """
        if self.calibration is None:
            return self
        measured = self.calibration
        if measured.tier not in operations:
            raise ConfigError(
                f"profile {self.name}: it was measured with tier {measured.tier!r}, and the run has "
                f"{', '.join(operations)}"
            )
        (own,) = (each for each in self.classes if each.name == measured.device_class)
        factor = operations[measured.tier] / measured.seconds / own.speed.typical
        classes = tuple(
            replace(
                each,
                speed=Quantity.exactly(each.speed.typical * factor),
                joules=Quantity.exactly(each.joules.typical / factor),
            )
            for each in self.classes
        )
        return replace(self, classes=classes, calibration=None)


def draw_jitter(device_class: DeviceClass, seed: int, number: int, device: int) -> float:
    """Returns the factor on a device's duration in a round: log-normal with mean 1, and 1 without jitter."""
    if not device_class.jitter:
        return 1.0
    normal = seeds.stream(seed, "jitter", number, device).standard_normal()
    return math.exp(device_class.jitter * float(normal) - device_class.jitter**2 / 2)


def is_there(device_class: DeviceClass, seed: int, number: int, device: int) -> bool:
    """Returns whether a device can be asked in a round."""
    return _happens(device_class.availability, seed, "availability", number, device)


def drops_out(device_class: DeviceClass, seed: int, number: int, device: int) -> bool:
    """Returns whether a device that was asked in a round does not answer."""
    return _happens(device_class.dropout, seed, "drop-out", number, device)


def _happens(probability: float, seed: int, purpose: str, number: int, device: int) -> bool:
    if probability in (0.0, 1.0):
        return bool(probability)
    return float(seeds.stream(seed, purpose, number, device).random()) < probability


def _shuffle(members: Sequence[int], seed: int, tier: str) -> list[int]:
    return [members[k] for k in seeds.stream(seed, "device classes", tier).permutation(len(members))]


def _deal(members: Sequence[int], classes: Sequence[DeviceClass]) -> dict[int, DeviceClass]:
    """Cuts devices into classes by their shares."""
    total, ends, so_far = sum(each.share for each in classes), [0], 0.0
    for each in classes:
        so_far += each.share
        ends.append(round(so_far / total * len(members)))
    cuts = zip(pairwise(ends), classes, strict=True)
    return {device: each for (begin, end), each in cuts for device in members[begin:end]}
