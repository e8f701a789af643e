"""Which devices are active in a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable

from fedhen import seeds
from fedhen.algorithm.oort import Notes, Oort
from fedhen.algorithm.timetable import Timetable
from fedhen.config.devices_settings import DevicesConfig
from fedhen.seeds import Root

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


@runtime_checkable
class Remembers(Protocol):
    """A sampler that depends on more of the earlier rounds than the devices' last losses."""

    notes: Notes

    def observe(self, number: int, losses: Mapping[int, float]) -> None:
        """Takes note of a round: the losses of all devices whose updates were merged."""
        ...


def make_sampler(
    devices: DevicesConfig, seed: Root, tier_of: Sequence[str] = (), times: Timetable | None = None
) -> Activate:
    """Makes the configured sampler. `tier_of` is the tier of each device, which some samplers need, as `times`.

    All but `loss` and `oort` depend on the seed or secret, the round and the devices' time alone, so that all methods
    train the same devices. If devices have joined since the run began, there are more than `devices.number`:
    `bernoulli` keeps the share that is active, and the others keep the number.
    """
    everyone = len(tier_of) or devices.number
    most = min(devices.active, everyone)

    def uniform(number: int, losses: Mapping[int, float]) -> list[int]:
        stream = seeds.stream(seed, "active devices", number)
        return sorted(int(d) for d in stream.choice(everyone, most, replace=False))

    def by_tier(number: int, losses: Mapping[int, float]) -> list[int]:
        stream = seeds.stream(seed, "active devices", number)
        members, counts = list_members(tier_of), share_out(most, tier_of)
        drawn = [stream.choice(of, counts[tier], replace=False) for tier, of in members.items()]
        return sorted(int(d) for each in drawn for d in each)

    def bernoulli(number: int, losses: Mapping[int, float]) -> list[int]:
        draws = seeds.stream(seed, "active devices", number).random(everyone)
        return [d for d in range(everyone) if draws[d] < devices.active / devices.number]

    def by_loss(number: int, losses: Mapping[int, float]) -> list[int]:
        """Power of choice (Cho et al. 2020), with the losses that devices reported when they last trained."""
        candidates = seeds.stream(seed, "active devices", number).choice(
            everyone, count_candidates(devices, everyone), replace=False
        )
        # Devices that have never trained come first, those with a NaN loss last. Ties keep the order of the draw.
        last_losses = {device: -math.inf if math.isnan(loss) else loss for device, loss in losses.items()}
        ranked = sorted(candidates, key=lambda device: -last_losses.get(int(device), math.inf))
        return sorted(int(device) for device in ranked[: devices.active])

    by_name = {"uniform": uniform, "by-tier": by_tier, "bernoulli": bernoulli, "loss": by_loss}
    if times is None:
        return by_name[devices.sampling]
    if devices.sampling == "oort":
        return Oort(list_members(tier_of), share_out(devices.active, tier_of), times, seed)
    if devices.sampling == "deadline":
        return make_deadline_sampler(devices, seed, tier_of, times)
    return among_those_there(by_name[devices.sampling], times, seed)


def make_deadline_sampler(devices: DevicesConfig, seed: Root, tier_of: Sequence[str], times: Timetable) -> Activate:
    """Makes the sampler of FedCS (Nishio and Yonetani 2019): of some candidates those that meet the deadline.

    Each tier has its share of the candidates and of the active devices. The fastest come first.
    """
    candidates = share_out(count_candidates(devices, len(tier_of)), tier_of)
    quotas = share_out(devices.active, tier_of)

    def in_time(number: int, losses: Mapping[int, float]) -> list[int]:
        stream, there = seeds.stream(seed, "active devices", number), times.there(number)
        chosen: list[int] = []
        for tier, members in list_members(tier_of).items():
            here = [device for device in members if device in there]
            drawn = stream.choice(here, min(len(here), candidates[tier]), replace=False).tolist() if here else []
            able = [device for device in drawn if times.seconds[device] <= times.deadline]
            # Devices of one class are equally fast: they keep the order of the draw.
            chosen += sorted(able, key=lambda device: times.seconds[device])[: quotas[tier]]
        return sorted(chosen)

    return in_time


def count_candidates(devices: DevicesConfig, everyone: int) -> int:
    """Returns the number of candidates to draw."""
    return min(everyone, max(devices.active, devices.candidates or 2 * devices.active))


def list_members(tier_of: Sequence[str]) -> dict[str, list[int]]:
    """Returns tier -> its devices."""
    return {tier: [d for d, own in enumerate(tier_of) if own == tier] for tier in dict.fromkeys(tier_of)}


def share_out(number: int, tier_of: Sequence[str]) -> dict[str, int]:
    """Shares a number of devices out to the tiers. Returns tier -> its share."""
    members = list_members(tier_of)
    ends = [round(number * end / len(tier_of)) for end in accumulate(map(len, members.values()))]
    return {tier: end - begin for tier, (begin, end) in zip(members, pairwise([0, *ends]), strict=True)}


def among_those_there(draw: Activate, times: Timetable, seed: Root) -> Activate:
    """Makes a sampler that asks others in place of devices that cannot be asked, as far as there are any."""

    def active(number: int, losses: Mapping[int, float]) -> list[int]:
        there = sorted(times.there(number))
        return replace_absent(draw(number, losses), there, seed, number) if there else []

    return active


def make_sampler_of(members: Sequence[int], devices: DevicesConfig, seed: Root, tier_of: Sequence[str]) -> Activate:
    """Makes the configured sampler for some of the devices, as if there were no others."""
    draw = make_sampler(replace(devices, number=len(members)), seed, [tier_of[device] for device in members])

    def active(number: int, losses: Mapping[int, float]) -> list[int]:
        known = {place: losses[device] for place, device in enumerate(members) if device in losses}
        return [members[place] for place in draw(number, known)]

    return active


def replace_absent(drawn: Sequence[int], present: Sequence[int], seed: Root, number: int) -> list[int]:
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
