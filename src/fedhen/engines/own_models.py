"""Scores models on the test data of each device, one device after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedhen.engines.scoring import Scoring
from fedhen.engines.sequential import SequentialDevices
from fedhen.models.family import load_weights
from fedhen.params import TierModels


class Asked(NamedTuple):
    """Whose models to score on which devices' test data."""

    round: int
    models: TierModels
    """The server's models after that round."""
    owners: tuple[str, ...]
    """"server" for the server's model of the device's tier."""
    devices: Sequence[int]


class OwnSums(NamedTuple):
    """What a device's test data adds to each metric."""

    owner: str
    device: int
    sums: list[list[float]]
    """The sums of each metric; empty if the device has no test data."""


ScoreOwn = Callable[[Asked], list[OwnSums]]
"""Scores models on the devices' own test data."""


@dataclass
class OwnModels:
    """Scores models on the devices' test data. One model is in memory at a time."""

    devices: SequentialDevices
    scoring: Scoring

    def score(self, asked: Asked) -> list[OwnSums]:
        """Returns what each device's test data adds to the metrics, for every owner that is asked for."""
        return self.score_server(asked) if "server" in asked.owners else []

    def score_server(self, asked: Asked) -> list[OwnSums]:
        """Scores the server's models, each of which is loaded once."""
        population, found = self.devices.population, list[OwnSums]()
        for tier, weights in asked.models.items():
            module = self.scoring.modules[tier].eval()
            load_weights(module, weights)
            for device in (device for device in asked.devices if population.tier_of[device] == tier):
                sums = self.scoring.score_examples(module, population.data.test_shards[device])
                found.append(OwnSums("server", device, [each.tolist() for each in sums]))
        return found
