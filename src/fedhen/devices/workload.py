"""Measures the workload of a population: counts what its models compute and what its devices hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from torch import nn

from fedhen import seeds
from fedhen.devices.population import Population
from fedhen.models.operations import count_operations, count_training_operations
from fedhen.profiles.workload import Workload


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
    if population.config.privacy.is_private:
        return Workload(operations, training)
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
