"""The plain runtime: this machine trains the active devices one after the other. It is the oracle for every other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from fedhen import seeds
from fedhen.algorithm.holdings import Holding
from fedhen.algorithm.merging import Server, Update
from fedhen.algorithm.methods import Method
from fedhen.config import Config
from fedhen.data.batches import batch, visits
from fedhen.data.dataset import Data
from fedhen.local_training import learning_rate, train_locally
from fedhen.models.nesting import Family, load_weights, weights_of
from fedhen.params import Weights, select


@dataclass
class PlainDevices:
    """The devices of a simulated fleet; their data lies where they train."""

    config: Config
    method: Method
    family: Family
    holdings: Mapping[str, Holding]
    data: Data
    tier_of: Sequence[str]
    modules: dict[str, nn.Module] = field(default_factory=dict)
    constants: dict[str, Weights] = field(default_factory=dict)
    """Buffers that a module does not save: every device starts from them as they were built."""

    def train(self, round_number: int, server: Server, active: Sequence[int]) -> Iterator[Update]:
        """Alg. 1, lines 5-15, one device after the other."""
        for device in active:
            yield self.train_one(round_number, device, server[self.tier_of[device]])

    def train_one(self, round_number: int, device: int, received: Weights) -> Update:
        """Alg. 2 on one device."""
        tier, training, shard = self.tier_of[device], self.config.training, self.data.shards[device]
        address = (self.config.seed, round_number, device)
        plan = visits(shard, training.epochs, training.batch_size, training.last_batch == "drop", address)
        batches = (batch(self.data, plan, part, self.config.data.augmentation) for part in plan.batches())
        module = self.module(tier)
        load_weights(module, {**self.constants[tier], **received})
        # A model's own randomness, like dropout, has an address too.
        with seeds.torch_randomness(self.config.seed, "model", round_number, device):
            lr = learning_rate(training, round_number, self.config.rounds)
            loss = train_locally(module, batches, self.method.objective, training, lr=lr)
        held = self.holdings[tier]
        return Update(device, tier, select(weights_of(module), held.shapes), held.trained, len(shard), loss)

    def module(self, tier: str) -> nn.Module:
        """The one module that all devices of a tier train in, one after the other."""
        if tier not in self.modules:
            with seeds.torch_randomness(self.config.seed, "initial weights"):
                module = self.modules[tier] = self.family.build(tier).to(self.data.x.device)
            saved = module.state_dict()
            self.constants[tier] = {n: b.clone() for n, b in module.named_buffers() if n not in saved}
        return self.modules[tier]
