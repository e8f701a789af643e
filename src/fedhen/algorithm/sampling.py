"""Which devices are active in a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fedhen import seeds
from fedhen.config.settings import DevicesConfig

Activate = Callable[[int, Mapping[int, float]], list[int]]
"""(round, the loss that each device reported last) -> the active devices, in rising order."""


NO_LOSSES: Mapping[int, float] = {}
"""No device has trained yet."""


def make_sampler(devices: DevicesConfig, seed: int) -> Activate:
    """Whom to activate; all but `loss` depend on seed and round alone, so that all methods see the same devices."""

    def uniform(number: int, losses: Mapping[int, float]) -> list[int]:
        stream = seeds.stream(seed, "active devices", number)
        return sorted(int(d) for d in stream.choice(devices.number, devices.active, replace=False))

    def bernoulli(number: int, losses: Mapping[int, float]) -> list[int]:
        draws = seeds.stream(seed, "active devices", number).random(devices.number)
        return [d for d in range(devices.number) if draws[d] < devices.active / devices.number]

    def by_loss(number: int, losses: Mapping[int, float]) -> list[int]:
        """Power of choice (Cho et al. 2020) by the losses that devices reported when they last trained."""
        pool = min(devices.number, max(devices.active, devices.candidates or 2 * devices.active))
        candidates = seeds.stream(seed, "active devices", number).choice(devices.number, pool, replace=False)
        # A device that has never trained comes first, one whose loss is no number last; ties go to the one drawn first.
        last_losses = {device: -math.inf if math.isnan(loss) else loss for device, loss in losses.items()}
        ranked = sorted(candidates, key=lambda device: -last_losses.get(int(device), math.inf))
        return sorted(int(device) for device in ranked[: devices.active])

    return {"uniform": uniform, "bernoulli": bernoulli, "loss": by_loss}[devices.sampling]
