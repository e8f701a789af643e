"""Alg. 1: sample, train on the active devices, leave out the non-finite, merge. One generator for every method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedhen import seeds
from fedhen.algorithm.merging import Server, Update, merge
from fedhen.algorithm.methods import Method
from fedhen.config import DevicesConfig, ServerConfig
from fedhen.params import finite

Activate = Callable[[int], list[int]]
"""Round -> the active devices, in rising order."""


class Devices(Protocol):
    """Whoever trains the active devices: the loop never knows who."""

    def train(self, round_number: int, server: Server, active: Sequence[int]) -> Iterator[Update]:
        """Alg. 1, lines 5-15: send each active device its tier's model, and yield what comes back, in any order."""
        ...


@dataclass(frozen=True)
class Round:
    """What a round did."""

    number: int
    active: list[int]
    updates: list[Update]
    """The finite ones, which entered the merge, in the order of the devices."""
    dropped: list[int]
    """Active devices that were left out because a weight was not finite."""
    server: Server

    @property
    def loss(self) -> float | None:
        """The mean of the devices' mean local losses; none where no device came back, or where it is not finite."""
        losses = [update.loss for update in self.updates]
        mean = sum(losses) / len(losses) if losses else math.nan
        return mean if math.isfinite(mean) else None


def rounds(
    server: Server, method: Method, devices: Devices, activate: Activate, *, rule: ServerConfig, numbers: Sequence[int]
) -> Iterator[Round]:
    """Run these rounds one by one, from the given server models."""
    for number in numbers:
        active = activate(number)
        # In the order of the devices, so that it does not matter in which order they come back.
        updates = sorted(devices.train(number, server, active), key=lambda update: update.device)
        # The paper, "Hyperparameters": a device with NaN weights is ignored, only for that round.
        kept = [update for update in updates if finite(update.weights)]
        dropped = sorted({update.device for update in updates} - {update.device for update in kept})
        server = merge(server, kept, method.pools, rule)
        yield Round(number, active, kept, dropped, server)


def sampling(devices: DevicesConfig, seed: int) -> Activate:
    """Whom to activate: it depends on seed and round alone, so that all methods see the same devices."""

    def uniform(number: int) -> list[int]:
        stream = seeds.stream(seed, "active devices", number)
        return sorted(int(d) for d in stream.choice(devices.number, devices.active, replace=False))

    def bernoulli(number: int) -> list[int]:
        draws = seeds.stream(seed, "active devices", number).random(devices.number)
        return [d for d in range(devices.number) if draws[d] < devices.active / devices.number]

    return {"uniform": uniform, "bernoulli": bernoulli}[devices.sampling]
