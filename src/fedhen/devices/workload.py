"""Measures the workload of a population: counts what its models compute and what its devices hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from torch import nn

from fedhen import seeds
from fedhen.algorithm.gradients import LossOf
from fedhen.algorithm.local_training import freeze
from fedhen.algorithm.personal import Phase, find_frozen, train_phase
from fedhen.data.inputs import map_tensors
from fedhen.devices.population import Population
from fedhen.models.operations import count_all, count_operations, count_training_operations
from fedhen.profiles.workload import TrainingPhase, Workload


def measure_workload(population: Population) -> Workload:
    """Counts what the models of a population compute, and what its devices hold."""

    def run_model(tier: str, module: nn.Module) -> int:
        return count_operations(module, population.data.in_type_of(module).sample()[0])

    def train_model(tier: str, module: nn.Module) -> int:
        inputs, targets = population.data.in_type_of(module).sample()
        return round(count_training_operations(module, population.objectives[tier], inputs, targets))

    operations, training = _count(population, run_model), _count(population, train_model)
    if population.config.privacy.is_private:
        return Workload(operations, training)
    phases = measure_phases(population)
    training = {t: number for t, number in training.items() if all(t in phase.operations for phase in phases)}
    if population.config.privacy.mechanism == "none":
        return Workload(operations, training, [int(number) for number in population.examples], phases=phases)
    sums = dict.fromkeys(population.config.tiers, 0)
    for tier, number in zip(population.tier_of, population.examples, strict=True):
        sums[tier] += int(number)
    return Workload(operations, training, tier_examples=sums, phases=phases)


def measure_phases(population: Population) -> list[TrainingPhase]:
    """Counts what the phases of a round compute; empty if there is one, of the usual steps."""
    phases = [*population.personal.training, *population.personal.copy]
    if phases == [train_phase(population.config)]:
        return []
    found = []
    for phase in phases:
        operations = _count(population, partial(_count_step, population, phase))
        found.append(TrainingPhase(operations, phase.epochs, phase.max_steps, phase.gradient.batches))
    return found


def _count_step(population: Population, phase: Phase, tier: str, module: nn.Module) -> int:
    """Returns the operations of one example in a step of a phase."""
    inputs, targets = population.data.in_type_of(module).sample()
    frozen = find_frozen(phase.trains, module, population.parts[tier])
    if frozen.issuperset(name for name, weight in module.named_parameters() if weight.requires_grad):
        return 0
    loss_of = LossOf(module.cpu().train(), population.objectives[tier])
    batch = (map_tensors(inputs, lambda tensor: tensor.cpu()), targets.cpu())
    with freeze(module, frozen), count_all() as counter:
        phase.gradient.compute(loss_of, [batch] * phase.gradient.batches)
    return round(counter.get_total_flops() / (len(targets) * phase.gradient.batches))


def _count(population: Population, count: Callable[[str, nn.Module], int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for tier in population.holdings:
        with seeds.randomness(0, "operations"), suppress(Exception):  # a user's module may do anything
            found[tier] = count(tier, population.family.build(tier))
    return found
