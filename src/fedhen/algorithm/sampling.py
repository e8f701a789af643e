"""Which devices are active in a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fedhen import seeds
from fedhen.config.settings import DevicesConfig

Activate = Callable[[int, Mapping[int, float]], list[int]]
"""A sampler: chooses the devices that are active in a round.

Args:
    number: The round, from 1.
    losses: Device -> the mean local loss that it reported when it last trained. Devices that have not trained yet are
        missing, and a loss may be infinite or NaN.

Returns:
    The active devices, numbers from 0. Order and repetitions do not matter. An empty list is a round without training.

A sampler that depends on its arguments alone makes runs repeatable and resumable. For random choices, derive the stream
from the round:

    def evens(number, losses):
        drawn = numpy.random.default_rng([0, number]).choice(50, 5, replace=False)
        return [2 * int(device) for device in drawn]

    fedhen.train(..., activate=evens)
"""


NO_LOSSES: Mapping[int, float] = {}
"""No device has trained yet."""


def make_sampler(devices: DevicesConfig, seed: int) -> Activate:
    """Makes the configured sampler.

    All but `loss` depend on the seed and the round alone, so that all methods train the same devices.
    """

    def uniform(number: int, losses: Mapping[int, float]) -> list[int]:
        stream = seeds.stream(seed, "active devices", number)
        return sorted(int(d) for d in stream.choice(devices.number, devices.active, replace=False))

    def bernoulli(number: int, losses: Mapping[int, float]) -> list[int]:
        draws = seeds.stream(seed, "active devices", number).random(devices.number)
        return [d for d in range(devices.number) if draws[d] < devices.active / devices.number]

    def by_loss(number: int, losses: Mapping[int, float]) -> list[int]:
        """Power of choice (Cho et al. 2020), with the losses that devices reported when they last trained."""
        size = min(devices.number, max(devices.active, devices.candidates or 2 * devices.active))
        candidates = seeds.stream(seed, "active devices", number).choice(devices.number, size, replace=False)
        # Devices that have never trained come first, those with a NaN loss last. Ties keep the order of the draw.
        last_losses = {device: -math.inf if math.isnan(loss) else loss for device, loss in losses.items()}
        ranked = sorted(candidates, key=lambda device: -last_losses.get(int(device), math.inf))
        return sorted(int(device) for device in ranked[: devices.active])

    return {"uniform": uniform, "bernoulli": bernoulli, "loss": by_loss}[devices.sampling]
