"""Oort (Lai et al., OSDI 2021): asks devices with high losses that are not slow, and some that are new.

Losses of unlike objectives cannot be compared, so devices are ranked within their tier, and each tier has its share of
the active devices. A device's utility is the number of its examples times the mean loss that it reported last. Oort has
the root mean square of the examples' losses in place of this mean, which devices do not send.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np

from fedhen import seeds
from fedhen.algorithm.timetable import Timetable

EXPLORATION, EXPLORATION_DECAY, LEAST_EXPLORATION = 0.9, 0.95, 0.2
"""ε, the share of new devices: in the first round ε times its decay."""
CLIPPED_AT = 0.95
"""Utilities above this quantile count as much as the quantile."""
STALENESS = 0.1
"""The score of a device rises by the root of this times ln(round) / (the round in which it was heard last)."""
SLOWNESS = 2
"""The power of T/d, with which the score of a device is multiplied whose duration d exceeds the preferred one, T."""
CUT = 0.95
"""Devices are drawn among those whose scores are at least this times the last score that is wanted."""
FIRST_PERCENTILE, PERCENTILE_STEP = 30, 5
"""T is this percentile of all durations, and by how much it rises when utility stalls."""
WINDOW = 20
"""The number of rounds whose utility is compared with that of as many rounds before."""
STALLED = 0.1
"""Utility stalls if it changes by less than this share of it."""


@dataclass(frozen=True)
class Notes:
    """What Oort remembers of earlier rounds."""

    heard: Mapping[int, int] = field(default_factory=dict)
    """Device -> the last round whose merged update it sent."""
    gains: Sequence[float] = ()
    """The mean utility of the devices in each of the last rounds."""
    percentile: int = FIRST_PERCENTILE

    def after(self, number: int, utilities: Mapping[int, float]) -> Notes:
        """Returns the notes after a round, given the utility of each device whose update was merged."""
        gains = [*self.gains, mean(utilities.values()) if utilities else 0.0][-2 * WINDOW :]
        percentile = self.percentile
        if len(gains) == 2 * WINDOW and number % WINDOW == 0:
            before, now = math.fsum(gains[:WINDOW]), math.fsum(gains[WINDOW:])
            if abs(now - before) <= STALLED * before:
                percentile = min(100, percentile + PERCENTILE_STEP)
        return Notes({**self.heard, **dict.fromkeys(utilities, number)}, gains, percentile)

    def describe(self) -> dict[str, Any]:
        """Returns the notes as plain values."""
        heard = [[device, number] for device, number in self.heard.items()]
        return {"heard": heard, "gains": list(self.gains), "percentile": self.percentile}


def parse_notes(saved: Mapping[str, Any], devices: int, played: int) -> Notes:
    """Reads described notes of a run with so many devices and played rounds. Raises a ValueError if they are wrong."""
    heard = {int(device): int(number) for device, number in saved["heard"]}
    gains, percentile = [float(each) for each in saved["gains"]], int(saved["percentile"])
    if not all(0 <= device < devices and 1 <= number <= played for device, number in heard.items()):
        raise ValueError("a device or a round that the run does not have")
    if not all(map(math.isfinite, gains)) or len(gains) > 2 * WINDOW or not FIRST_PERCENTILE <= percentile <= 100:
        raise ValueError("numbers that Oort cannot have noted")
    return Notes(heard, gains, percentile)


@dataclass
class Oort:
    """The sampler, with its notes."""

    members: Mapping[str, Sequence[int]]
    """Tier -> its devices."""
    quotas: Mapping[str, int]
    """Tier -> the number of its devices to ask."""
    times: Timetable
    seed: seeds.Root
    notes: Notes = Notes()

    def __call__(self, number: int, losses: Mapping[int, float]) -> list[int]:
        stream, there = seeds.stream(self.seed, "active devices", number), self.times.there(number)
        chosen: list[int] = []
        for tier, members in self.members.items():
            here = [device for device in members if device in there]
            chosen += self.choose(number, here, self.quotas[tier], losses, stream)
        return sorted(chosen)

    def choose(
        self,
        number: int,
        devices: Sequence[int],
        quota: int,
        losses: Mapping[int, float],
        stream: np.random.Generator,
    ) -> list[int]:
        """Chooses among devices of one tier: known ones by score, new ones by speed."""
        known = [device for device in devices if device in self.notes.heard]
        new = [device for device in devices if device not in self.notes.heard]
        explored = min(len(new), quota - math.floor(quota * (1 - exploration(number))))
        exploited = min(len(known), quota - explored)
        explored = min(len(new), quota - exploited)
        return [
            *draw(self.find_best(number, known, losses, exploited), exploited, stream),
            *draw({device: 1 / self.times.seconds[device] for device in new}, explored, stream),
        ]

    def find_best(
        self, number: int, known: Sequence[int], losses: Mapping[int, float], wanted: int
    ) -> dict[int, float]:
        """Returns the scores of the devices to draw among: the wanted number of best ones, and those close to them."""
        if not wanted:
            return {}
        scores = self.score(number, known, losses)
        least = CUT * sorted(scores.values(), reverse=True)[wanted - 1]
        return {device: score for device, score in scores.items() if score >= least}

    def score(self, number: int, known: Sequence[int], losses: Mapping[int, float]) -> dict[int, float]:
        """Returns the score of each known device of a tier."""
        utilities = {device: self.utility(device, losses) for device in known}
        ordered, preferred = sorted(utilities.values()), self.preferred_seconds()
        least, clip = ordered[0], ordered[min(int(len(ordered) * CLIPPED_AT), len(ordered) - 1)]
        scores = {}
        for device, utility in utilities.items():
            score = (min(utility, clip) - least) / (clip - least) if clip > least else 0.0
            score += math.sqrt(STALENESS * math.log(number) / self.notes.heard[device])
            own = self.times.seconds[device]
            scores[device] = score * (preferred / own) ** SLOWNESS if own > preferred else score
        return scores

    def utility(self, device: int, losses: Mapping[int, float]) -> float:
        """Returns the utility of a device; 0 if its loss is not finite."""
        loss = losses.get(device, 0.0)
        return self.times.examples[device] * loss if math.isfinite(loss) else 0.0

    def preferred_seconds(self) -> float:
        """Returns T, above which a device is slow."""
        ordered, percentile = sorted(self.times.seconds), self.notes.percentile
        return ordered[len(ordered) * percentile // 100] if percentile < 100 else math.inf

    def observe(self, number: int, losses: Mapping[int, float]) -> None:
        """Takes note of a round: the losses of all devices whose updates were merged."""
        self.notes = self.notes.after(number, {device: self.utility(device, losses) for device in losses})


def exploration(number: int) -> float:
    """Returns the share of new devices in a round."""
    return max(LEAST_EXPLORATION, EXPLORATION * EXPLORATION_DECAY**number)


def draw(weights: Mapping[int, float], number: int, stream: np.random.Generator) -> Collection[int]:
    """Draws devices with probabilities in proportion to their weights, none of them twice."""
    if number >= len(weights):
        return list(weights)
    total = math.fsum(weights.values())
    chances = np.array([weight / total for weight in weights.values()]) if total else None
    return [int(device) for device in stream.choice(list(weights), number, replace=False, p=chances)]
