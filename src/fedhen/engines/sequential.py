"""The sequential engine: trains the active devices one after the other. All other engines are compared with it.

On a CPU a device trains with `runtime.threads` torch threads, in its tier's module as it was built. So its result
depends on the round, the device and what it was sent, and not on the process or on what was trained before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedhen import seeds
from fedhen.algorithm.failures import describe_device_error
from fedhen.algorithm.local_training import LocalProblem, learning_rate, train_locally
from fedhen.algorithm.local_variants import LocalContext
from fedhen.algorithm.optimizers import make_optimizer
from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Failure, Reply, Update
from fedhen.data.batches import Visits, make_batch, plan_visits
from fedhen.data.inputs import Inputs
from fedhen.devices.population import Population
from fedhen.devices.state_store import StateStore
from fedhen.engines.module_copies import ModuleCopies
from fedhen.hardware.threads import threads_per_worker, torch_threads
from fedhen.models.family import load_weights
from fedhen.models.image_layout import apply_image_layout, fast_convolutions
from fedhen.models.lazy_exits import mask_logits
from fedhen.params import Weights, is_finite


class LocalResult(NamedTuple):
    """The result of a device's local training in a round."""

    weights: Weights
    loss: float
    """The mean over its steps."""
    steps: int
    optimizer: Mapping[str, Tensor] = {}
    """The state of its optimiser, if the device keeps it."""


@dataclass
class SequentialDevices:
    """The simulated devices, trained where their data is."""

    population: Population
    memory: StateStore = field(default_factory=StateStore)
    """Device -> what it keeps between its rounds (`Population.state_like`), if it has trained."""

    def __post_init__(self) -> None:
        # Without a reference to this object: a cycle would keep all devices' states until the next garbage collection.
        self.modules = ModuleCopies(partial(build_module, self.population))

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Alg. 1, lines 5-15, one device after the other."""
        for device in active:
            yield self.attempt(round_number, device, sent)

    def admit(self, population: Population) -> None:
        """Takes the population of the next round, with devices that have joined."""
        self.population = population

    def attempt(self, round_number: int, device: int, sent: Sent, result: LocalResult | None = None) -> Reply:
        """Trains one device (Alg. 2), or takes the result of a training elsewhere. Turns its error into a Failure."""
        try:
            context = self.local_context(device, sent)
            result = result or self.train_locally(round_number, device, sent, context)
            return self.make_update(round_number, device, result, context, sent)
        except Exception as error:
            return Failure(device, describe_device_error(error))

    def train_locally(self, round_number: int, device: int, sent: Sent, context: LocalContext) -> LocalResult:
        """Trains one device (Alg. 2). Raises whatever its training raises."""
        population, tier = self.population, self.population.tier_of[device]
        module = self.modules.take(tier)
        load_weights(module, sent.models[tier])
        correction, mask = population.local.correction(context), self.logit_mask(device)
        lr, training = self.lr(round_number), population.config.training
        problem = LocalProblem(population.objectives[tier], training, lr, correction, mask, population.precision)
        optimizer = make_optimizer(training, lr, correction.decay)
        if like := population.optimizer_like(tier, context.received):
            optimizer.load(dict(module.named_parameters()), context.memory)
        # Random choices of the model, such as dropout, have an address too.
        address = population.config.seed, "model", round_number, population.first + device
        with (
            torch_threads(threads_per_worker(population.config.runtime)),
            seeds.randomness(*address),
            fast_convolutions(module),
        ):
            loss, steps = train_locally(module, self.batches(round_number, device), problem, optimizer)
        trained = module.state_dict()
        # A copy, since the next device trains in the same module.
        weights = {n: trained[n].clone(memory_format=torch.contiguous_format) for n in population.holdings[tier].shapes}
        return LocalResult(weights, loss, steps, optimizer.keep(like))

    def make_update(
        self, round_number: int, device: int, result: LocalResult, context: LocalContext, sent: Sent
    ) -> Update:
        """Makes the update of a trained device, and stores what the device keeps."""
        population, tier = self.population, self.population.tier_of[device]
        draw = partial(self.draw_for_rounding, round_number, device)
        letter = population.wires[tier].send_up(result.weights, sent.models[tier], context.memory, draw)
        update = Update(
            device,
            tier,
            result.weights,
            population.holdings[tier].trained,
            samples=len(population.data.shards[device]),
            loss=result.loss,
            rows=self.label_rows(device, result.weights),
            encoded=letter.tensors,
            omega=population.omega[device],
        )
        return self.store_state(update, context, result, letter.kept, self.lr(round_number))

    def draw_for_rounding(self, round_number: int, device: int, number: int) -> Tensor:
        """Returns random numbers of [0, 1) with which the wire rounds a device's update."""
        population = self.population
        address = population.config.seed, "wire", round_number, population.first + device
        return torch.from_numpy(seeds.stream(*address).random(number, dtype=np.float32))

    def local_context(self, device: int, sent: Sent) -> LocalContext:
        return self.population.local_context(device, sent, self.memory.get(device, {}))

    def store_state(
        self, update: Update, context: LocalContext, result: LocalResult, unsent: Weights, lr: float
    ) -> Update:
        """Stores what the device keeps, unless its weights are not finite. Returns the update with the change."""
        if not self.population.keeps_state or not is_finite(update.weights):
            return update
        memory, change = self.next_memory(context, update.weights, result.steps * lr)
        # Last, so that a device that fails keeps its old state.
        self.memory[update.device] = {**memory, **result.optimizer, **unsent}
        return replace(update, memory_change=change)

    def next_memory(self, context: LocalContext, trained: Weights, total_lr: float) -> tuple[Weights, Weights]:
        """Returns the local variant's next memory and its change, both empty if it has none."""
        local = self.population.local
        if local.remember is None:
            return {}, {}
        memory = local.remember(context, trained, total_lr)
        if local.infer_change is not None:
            return memory, local.infer_change(context.received, trained)
        return memory, {n: t - context.memory[n] if n in context.memory else t for n, t in memory.items()}

    def lr(self, round_number: int) -> float:
        """Returns η in that round."""
        return learning_rate(self.population.config.training, round_number, self.population.config.rounds)

    def plan_batches(self, round_number: int, device: int) -> Visits:
        """Returns which examples the device trains on in that round, in order."""
        config, shard = self.population.config, self.population.data.shards[device]
        training, address = config.training, (config.seed, round_number, self.population.first + device)
        drops = training.last_batch == "drop"
        visits = plan_visits(shard, training.epochs, training.batch_size, drops, address, training.max_steps)
        return visits if self.population.counted is None else visits.only(self.population.counted)

    def batches(self, round_number: int, device: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Returns the device's batches of all epochs."""
        plan, augmentation = self.plan_batches(round_number, device), self.population.config.data.augmentation
        if not len(plan.ends):
            raise ValueError("none of its targets counts: all of them are padding")
        return (make_batch(self.population.data, plan, part, augmentation) for part in plan.batches())

    def logit_mask(self, device: int) -> partial[Sequence[Tensor]]:
        """Returns what is applied to the logits: `training.masked_loss` sets those of classes that it lacks to 0."""
        if not self.population.config.training.masked_loss:
            return partial(lambda logits: logits)
        return partial(mask_logits, present=self.population.data.present(device))

    def label_rows(self, device: int, weights: Weights) -> dict[str, Tensor]:
        """Returns, if `server.rows_by_class` is set, the output rows that count: those of the device's classes."""
        if not self.population.config.server.rows_by_class:
            return {}
        return {
            name: self.population.data.present(device) for name in weights if name in self.population.family.outputs
        }

    def unsaved_buffers(self, tier: str) -> Weights:
        """Returns the buffers that a module does not save. Every device starts with their initial values."""
        module = self.modules.original(tier)
        saved = module.state_dict()
        return {name: buffer for name, buffer in module.named_buffers() if name not in saved}

    def build_module(self, tier: str) -> nn.Module:
        return build_module(self.population, tier)


def build_module(population: Population, tier: str) -> nn.Module:
    """Builds the module of that tier, always with the same weights."""
    data = population.data
    with seeds.randomness(population.config.seed, "initial weights"):
        module = population.family.build(tier).to(data.device)
    load_weights(module, population.fixed.get(tier, {}))
    return apply_image_layout(module, data.sample()[0], population.precision, population.config.training.batch_size)
