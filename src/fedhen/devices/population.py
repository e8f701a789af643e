"""The population: what each device has, holds and minimises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedhen.algorithm.local_variants import LocalContext, LocalVariant
from fedhen.algorithm.objectives import Objective
from fedhen.algorithm.ownership import Holding
from fedhen.algorithm.rounds import Sent
from fedhen.config.settings import Config
from fedhen.data.dataset import Data
from fedhen.hardware.precision import Precision
from fedhen.models.family import Family
from fedhen.params import Weights, numel


@dataclass(frozen=True)
class Population:
    """The simulated devices: what each has, holds and minimises."""

    config: Config
    family: Family
    data: Data
    tier_of: Sequence[str]
    holdings: Mapping[str, Holding]
    objectives: Mapping[str, Objective]
    """What the devices of each tier minimise."""
    local: LocalVariant
    omega: Sequence[float]
    """Each device's share of its pool's data, 1 where all have the same."""
    precision: Precision
    first: int = 0
    """The number of the first device here: a node of a real fleet has one, which need not be the fleet's first."""

    def cost(self, device: int) -> int:
        """How long a device trains, in parameters times examples."""
        examples = len(self.data.shards[device]) * self.config.training.epochs
        return numel(self.holdings[self.tier_of[device]].shapes) * examples

    def local_context(self, device: int, sent: Sent, memory: Weights) -> LocalContext:
        """What the local variant knows of a device that remembers this."""
        tier = self.tier_of[device]
        trained = {n: t for n, t in sent.models[tier].items() if n in self.holdings[tier].learned}
        return LocalContext(trained, memory, sent.mean.get(tier, {}), self.omega[device])


def assign_tiers(config: Config) -> list[str]:
    """The tier of every device."""
    return [tier for tier, number in config.tier_sizes().items() for _ in range(number)]


def compute_omega(sizes: Sequence[int], tier_of: Sequence[str], pools: Sequence[tuple[str, ...]]) -> list[float]:
    """ω_i = n_i·N/n of every device, N and n over the devices of its pool."""
    omega = [1.0] * len(sizes)
    for pool in pools:
        members = [device for device, tier in enumerate(tier_of) if tier in pool]
        total = sum(sizes[device] for device in members)
        for device in members:
            omega[device] = sizes[device] * len(members) / total
    return omega
