"""Makes the model of a device of its own: what it keeps, the server's model, and its training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedhen.algorithm.gradients import Batch
from fedhen.algorithm.personal import ALL, Phase
from fedhen.algorithm.prototypes import NearestPrototype
from fedhen.data.batches import make_batch
from fedhen.devices.population import COPY, PART
from fedhen.engines.sequential import Occasion, SequentialDevices, strip_prefix
from fedhen.models.family import load_weights
from fedhen.params import TierModels, select
from fedhen.runs.layout import LOCAL


@dataclass(frozen=True)
class PersonalModels:
    """Makes models of single devices, each of which is valid until the next. Test data plays no part."""

    devices: SequentialDevices

    def make_own(self, round_number: int, models: TierModels, device: int) -> nn.Module:
        """Returns the model of a device: of what it keeps and the server's, adapted to its training data."""
        population, personal = self.devices.population, self.devices.population.personal
        server, occasion = models[population.tier_of[device]], Occasion(round_number, device, ("adaptation",))
        kept = self.read_kept(device)
        module = self.devices.modules.take(population.tier_of[device])
        load_weights(module, {**server, **kept})
        phases = personal.adaptation if kept else personal.newcomers
        self.devices.train_phases(module, phases, occasion, pulled_to=server)
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
        initial = population.family.initial(population.streams.initial)
        return {tier: select(initial, holding.shapes) for tier, holding in population.holdings.items()}

    def make_local(self, initial: TierModels, device: int) -> nn.Module:
        """Returns a model that was trained on the device's data alone."""
        population = self.devices.population
        module, config = self.devices.modules.take(population.tier_of[device]), population.config
        load_weights(module, initial[population.tier_of[device]])
        phase = Phase(ALL, config.evaluation.local_epochs, lr=config.training.lr)
        self.devices.train_phases(module, (phase,), Occasion(0, device, (LOCAL,)))
        return module.eval()
