"""The settings of the clock of a simulation: how long devices take, and how long a round waits for them."""

from __future__ import annotations

from dataclasses import dataclass

from fedhen.config.devices_settings import DevicesConfig
from fedhen.config.setting import setting
from fedhen.errors import ConfigError

BY_TIME = ("oort", "deadline")
"""The samplings that look at how long devices take."""


@dataclass(frozen=True)
class ClockConfig:
    """How long devices take in a simulation. A real fleet takes its own time."""

    profile: str = setting(
        "",
        "a profile of devices: phones, mixed, sensors, or the path of a .toml file; empty: all devices can be asked, "
        "and all answer, however long they take",
    )
    deadline_seconds: float = setting(
        0.0,
        "seconds of the profile's time after which a round ends without the devices that have not answered; 0: never",
        least=0,
    )
    spare_devices: int = setting(
        0,
        "devices that are asked in addition to `devices.active`; a round ends without the slowest, as many as these",
        least=0,
    )


def check_clock(clock: ClockConfig, devices: DevicesConfig) -> None:
    """Raises a ConfigError if settings of the clock, or a sampling that looks at it, do not fit."""
    default = ClockConfig()
    for name in ("deadline_seconds", "spare_devices"):
        if getattr(clock, name) != getattr(default, name) and not clock.profile:
            raise ConfigError(
                f"clock.{name} needs clock.profile, which says how long devices take: phones, for example"
            )
    if devices.sampling in BY_TIME and not clock.profile:
        raise ConfigError(
            f"devices.sampling={devices.sampling} ranks devices by how long they take: set clock.profile, for example "
            "to phones"
        )
    if devices.sampling == "deadline" and not clock.deadline_seconds:
        raise ConfigError("devices.sampling=deadline needs a deadline: set clock.deadline_seconds")
    if devices.active + clock.spare_devices > devices.number:
        raise ConfigError(
            f"devices.active={devices.active} and clock.spare_devices={clock.spare_devices} are more than "
            f"devices.number={devices.number}: lower one of them"
        )
