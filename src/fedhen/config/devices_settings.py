"""The settings of the devices, and of which of them are active in a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedhen.config.setting import setting


@dataclass(frozen=True)
class DevicesConfig:
    """The devices, and which of them are active in a round."""

    number: int = setting(
        100, "number of devices; data that comes split decides it, but a single device holds all of it", least=1
    )
    active: int = setting(10, "number of active devices in a round", least=1)
    sampling: Literal["uniform", "by-tier", "bernoulli", "loss", "oort", "deadline"] = setting(
        "uniform",
        "uniform: exactly `active` devices; by-tier: the same, and of each tier as many as its share; "
        "bernoulli: each with probability active / number; "
        "loss: the candidates with the highest last reported loss (power of choice); "
        "oort: of each tier those with high losses that are not slow, and some that are new; "
        "deadline: of each tier the fastest candidates that meet clock.deadline_seconds (FedCS)",
    )
    candidates: int = setting(
        0, "loss, deadline: number of candidates that are drawn; 0: twice the active devices", least=0
    )
    tiers: tuple[str, ...] = setting((), "the tier of each device; empty: in the order of `tiers`, by their shares")
    held_out: float = setting(
        0.0,
        "share of the devices of each tier that never train; the final models are adapted to their data and scored on "
        "it, recorded as `held_out`",
        least=0,
        most=0.9,
    )
