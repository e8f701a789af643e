"""What a round asks of the devices: the operations of an example in each tier, and the examples of each device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import nn

from fedhen import seeds
from fedhen.devices.population import Population
from fedhen.models.operations import count_operations, count_training_operations

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workload:
    """Numbers from which reports and planners derive what a round costs a device."""

    operations: Mapping[str, int] = field(default_factory=dict)
    """Tier -> operations of one example in its model; without the tiers for which they cannot be counted."""
    training_operations: Mapping[str, int] = field(default_factory=dict)
    """Tier -> operations of one example in training: forward and backward."""
    examples: Sequence[int] = ()
    """The number of training examples of each device; empty if the run is to be private."""
    tier_examples: Mapping[str, int] = field(default_factory=dict)
    """Tier -> their sum, in private runs, whose records say nothing of a single device's data."""


def measure_workload(population: Population) -> Workload:
    """Counts what the models of a population compute, and what its devices hold."""

    def run_model(tier: str, module: nn.Module) -> int:
        return count_operations(module, population.data.in_type_of(module).sample()[0])

    def train_model(tier: str, module: nn.Module) -> int:
        inputs, targets = population.data.in_type_of(module).sample()
        return round(count_training_operations(module, population.objectives[tier], inputs, targets))

    operations, training = _count(population, run_model), _count(population, train_model)
    if population.config.privacy.mechanism == "none":
        return Workload(operations, training, [int(number) for number in population.examples])
    sums = dict.fromkeys(population.config.tiers, 0)
    for tier, number in zip(population.tier_of, population.examples, strict=True):
        sums[tier] += int(number)
    return Workload(operations, training, tier_examples=sums)


def _count(population: Population, count: Callable[[str, nn.Module], int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for tier in population.holdings:
        with seeds.randomness(0, "operations"), suppress(Exception):  # a user's module may do anything
            found[tier] = count(tier, population.family.build(tier))
    return found
