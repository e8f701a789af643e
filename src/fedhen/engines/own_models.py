"""Scores models on the test data of each device, one device after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from fedhen.algorithm.failures import describe_device_error
from fedhen.engines.personal_models import PersonalModels
from fedhen.engines.scoring import Scoring
from fedhen.engines.sequential import SequentialDevices
from fedhen.models.family import load_weights
from fedhen.params import TierModels
from fedhen.runs.layout import LOCAL, PERSONAL, SERVER


class Asked(NamedTuple):
    """Whose models to score on which devices' test data."""

    round: int
    models: TierModels
    """The server's models after that round."""
    owners: tuple[str, ...]
    """"server" for the server's model of the device's tier, "personal" for the device's own, made of it, and "local"
    for one that is trained on the device's data alone.
    """
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
        found, made = self.score_server(asked) if SERVER in asked.owners else [], PersonalModels(self.devices)
        if PERSONAL in asked.owners:
            found += self.score_each(PERSONAL, asked, lambda device: made.make_own(asked.round, asked.models, device))
        if LOCAL in asked.owners:
            initial = made.find_initial()
            found += self.score_each(LOCAL, asked, lambda device: made.make_local(initial, device))
        return found

    def score_server(self, asked: Asked) -> list[OwnSums]:
        """Scores the server's models, each of which is loaded once."""
        population, found = self.devices.population, list[OwnSums]()
        for tier, weights in asked.models.items():
            module = self.scoring.modules[tier].eval()
            load_weights(module, weights)
            for device in (device for device in asked.devices if population.tier_of[device] == tier):
                found.append(OwnSums(SERVER, device, self.score_module(module, device)))
        return found

    def score_each(self, owner: str, asked: Asked, make: Callable[[int], nn.Module]) -> list[OwnSums]:
        """Makes and scores a model for each device that has test data."""
        found = []
        for device in asked.devices:
            sums: list[list[float]] = []
            if len(self.devices.population.data.test_shards[device]):
                try:
                    sums = self.score_module(make(device), device)
                except Exception as error:
                    # A device whose training fails has no value; other errors are raised.
                    describe_device_error(error)
            found.append(OwnSums(owner, device, sums))
        return found

    def score_module(self, module: nn.Module, device: int) -> list[list[float]]:
        sums = self.scoring.score_examples(module, self.devices.population.data.test_shards[device])
        return [each.tolist() for each in sums]
