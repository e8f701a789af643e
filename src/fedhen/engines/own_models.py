"""Scores models on the test data of each device, one device after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from fedhen.algorithm.failures import describe_device_error
from fedhen.algorithm.gradients import Batch
from fedhen.algorithm.personal import ALL, Phase
from fedhen.algorithm.prototypes import NearestPrototype
from fedhen.data.batches import make_batch
from fedhen.devices.population import COPY, PART
from fedhen.engines.scoring import Scoring
from fedhen.engines.sequential import Occasion, SequentialDevices, strip_prefix
from fedhen.models.family import load_weights
from fedhen.params import TierModels, select
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
        found = self.score_server(asked) if SERVER in asked.owners else []
        if PERSONAL in asked.owners:
            found += self.score_each(PERSONAL, asked, lambda device: self.make_personal(asked, device))
        if LOCAL in asked.owners:
            initial = self.find_initial()
            found += self.score_each(LOCAL, asked, lambda device: self.make_local(initial, device))
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

    def make_personal(self, asked: Asked, device: int) -> nn.Module:
        """Returns the model of a device: of what it keeps and the server's, adapted to its training data."""
        population, personal = self.devices.population, self.devices.population.personal
        tier, occasion = population.tier_of[device], Occasion(asked.round, device, ("adaptation",))
        kept = self.read_kept(device)
        module = self.devices.copy_module(tier)
        load_weights(module, {**asked.models[tier], **kept})
        phases = personal.adaptation if kept else personal.newcomers
        self.devices.train_phases(module, phases, occasion, pulled_to=asked.models[tier])
        if personal.by_prototypes:
            classes = population.data.classes or population.outputs
            module = NearestPrototype(module, self.training_batches(occasion), classes)
        return module.eval()

    def read_kept(self, device: int) -> Mapping[str, Tensor]:
        """Returns the weights that a device keeps, by their names in the model."""
        memory = self.devices.memory.get(device, {})
        return {**strip_prefix(PART, memory), **strip_prefix(COPY, memory)}

    def training_batches(self, occasion: Occasion) -> Iterator[Batch]:
        """Returns the device's training data as it is, once."""
        plan = self.devices.plan_batches(occasion.round, occasion.device, Phase(ALL, 1), occasion.purpose)
        return (make_batch(self.devices.population.data, plan, part, "none") for part in plan.batches())

    def find_initial(self) -> TierModels:
        """Returns the models that training starts from."""
        population = self.devices.population
        initial = population.family.initial(population.config.seed)
        return {tier: select(initial, holding.shapes) for tier, holding in population.holdings.items()}

    def make_local(self, initial: TierModels, device: int) -> nn.Module:
        """Returns a model that was trained on the device's data alone."""
        population = self.devices.population
        module, config = self.devices.copy_module(population.tier_of[device]), population.config
        load_weights(module, initial[population.tier_of[device]])
        phase = Phase(ALL, config.evaluation.local_epochs, lr=config.training.lr)
        self.devices.train_phases(module, (phase,), Occasion(0, device, (LOCAL,)))
        return module.eval()
