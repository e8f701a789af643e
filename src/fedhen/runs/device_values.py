"""Statistics of a metric over devices, each of which is scored on its own test data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from fedhen.runs.records import DeviceValues, MetricInfo


@dataclass(frozen=True)
class Spread:
    """How a metric is spread over the devices of a tier. Every device counts once, whatever its number of examples."""

    devices: int
    """The devices that have a value."""
    mean: float
    deviation: float
    """The standard deviation over the devices."""
    worst_tenth: float
    """The mean of the worst tenth of the devices, at least one."""
    best_tenth: float
    hurt: float | None = None
    """The share of devices whose server model is better; None for the server's models themselves."""


def average_devices(values: Sequence[float | None]) -> float | None:
    """Returns the mean over the devices that have a value; None if there are none."""
    found = [value for value in values if value is not None]
    return fmean(found) if found else None


def describe_spread(
    values: Sequence[float | None], metric: MetricInfo, server: Sequence[float | None] = ()
) -> Spread | None:
    """Returns the spread of the values of a tier's devices. Returns None if no device has one.

    `server` are the values of the server's model on the same devices, if that is another one.
    """
    found = sorted((v for v in values if v is not None), reverse=metric.higher_is_better)
    if not found:
        return None
    tenth = math.ceil(len(found) / 10)
    pairs = [(v, s) for v, s in zip(values, server, strict=False) if v is not None and s is not None]
    hurt = sum(metric.is_better(s, v) for v, s in pairs) / len(pairs) if pairs else None
    return Spread(len(found), fmean(found), pstdev(found), fmean(found[-tenth:]), fmean(found[:tenth]), hurt)


def describe_owners(values: DeviceValues, metric: MetricInfo) -> dict[str, dict[str, Spread]]:
    """Returns owner -> tier -> the spread over the devices of the tier, where there is one."""
    server: Mapping[str, Sequence[float | None]] = values.get("server", {})
    return {
        owner: {
            tier: spread
            for tier, each in tiers.items()
            if (spread := describe_spread(each, metric, server.get(tier, ()) if owner != "server" else ()))
        }
        for owner, tiers in values.items()
    }
