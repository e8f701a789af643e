"""Which devices are active in a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

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


def make_sampler(devices: DevicesConfig, seed: int, tier_of: Sequence[str] = ()) -> Activate:
    """Makes the configured sampler. `tier_of` is the tier of each device, which `by-tier` needs.

    All but `loss` depend on the seed and the round alone, so that all methods train the same devices. If devices have
    joined since the run began, there are more than `devices.number`: `bernoulli` keeps the share that is active, and
    the others keep the number.
    """
    everyone = len(tier_of) or devices.number
    most = min(devices.active, everyone)

    def uniform(number: int, losses: Mapping[int, float]) -> list[int]:
        stream = seeds.stream(seed, "active devices", number)
        return sorted(int(d) for d in stream.choice(everyone, most, replace=False))

    def by_tier(number: int, losses: Mapping[int, float]) -> list[int]:
        stream = seeds.stream(seed, "active devices", number)
        members = {tier: [d for d, own in enumerate(tier_of) if own == tier] for tier in dict.fromkeys(tier_of)}
        ends = [round(most * end / everyone) for end in accumulate(map(len, members.values()))]
        counts = [end - begin for begin, end in pairwise([0, *ends])]
        drawn = [stream.choice(of, count, replace=False) for of, count in zip(members.values(), counts, strict=True)]
        return sorted(int(d) for each in drawn for d in each)

    def bernoulli(number: int, losses: Mapping[int, float]) -> list[int]:
        draws = seeds.stream(seed, "active devices", number).random(everyone)
        return [d for d in range(everyone) if draws[d] < devices.active / devices.number]

    def by_loss(number: int, losses: Mapping[int, float]) -> list[int]:
        """Power of choice (Cho et al. 2020), with the losses that devices reported when they last trained."""
        size = min(everyone, max(devices.active, devices.candidates or 2 * devices.active))
        candidates = seeds.stream(seed, "active devices", number).choice(everyone, size, replace=False)
        # Devices that have never trained come first, those with a NaN loss last. Ties keep the order of the draw.
        last_losses = {device: -math.inf if math.isnan(loss) else loss for device, loss in losses.items()}
        ranked = sorted(candidates, key=lambda device: -last_losses.get(int(device), math.inf))
        return sorted(int(device) for device in ranked[: devices.active])

    return {"uniform": uniform, "by-tier": by_tier, "bernoulli": bernoulli, "loss": by_loss}[devices.sampling]


def make_sampler_of(members: Sequence[int], devices: DevicesConfig, seed: int, tier_of: Sequence[str]) -> Activate:
    """Makes the configured sampler for some of the devices, as if there were no others."""
    draw = make_sampler(replace(devices, number=len(members)), seed, [tier_of[device] for device in members])

    def active(number: int, losses: Mapping[int, float]) -> list[int]:
        known = {place: losses[device] for place, device in enumerate(members) if device in losses}
        return [members[place] for place in draw(number, known)]

    return active


def replace_absent(drawn: Sequence[int], present: Sequence[int], seed: int, number: int) -> list[int]:
    """Returns the active devices of a round: those that were drawn, with stand-ins for the ones that are away.

    So the number that is active stays the same as long as enough devices are there, and a device that is away changes
    a round only if it is drawn. Without a stand-in the round has fewer. If nobody is there, those drawn remain.
    """
    there = set(present)
    if not there:
        return sorted(drawn)
    others = [device for device in sorted(there) if device not in drawn]
    shuffled = seeds.stream(seed, "stand-ins", number).permutation(others).tolist()
    standing_in = [shuffled.pop() for device in drawn if device not in there and shuffled]
    return sorted([*(device for device in drawn if device in there), *standing_in])
