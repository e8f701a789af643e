"""The sequential runtime: this process trains the active devices one after the other. It is the oracle for every other.

On a CPU a device is trained whole, with `runtime.threads` torch threads, in a module as it was built. So its result
depends on the round, the device and what it was sent, and not on who trains it, nor on what was trained before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from fedhen import seeds
from fedhen.algorithm.failures import describe_device_error
from fedhen.algorithm.local_training import LocalProblem, learning_rate, train_locally
from fedhen.algorithm.local_variants import LocalContext
from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Failure, Reply, Update
from fedhen.data.batches import Visits, make_batch, plan_visits
from fedhen.devices.population import Population
from fedhen.devices.state_store import StateStore
from fedhen.hardware.threads import threads_per_worker, torch_threads
from fedhen.models.exits import mask_logits
from fedhen.models.family import load_weights
from fedhen.models.image_layout import apply_image_layout, fast_convolutions
from fedhen.params import Weights, is_finite


class LocalResult(NamedTuple):
    """What a device has learned in a round."""

    weights: Weights
    loss: float
    """The mean of its steps."""
    steps: int


@dataclass
class SequentialDevices:
    """The devices of a simulated population; their data lies where they train."""

    population: Population
    memory: StateStore = field(default_factory=StateStore)
    """What each device that has trained remembers, where the local variant has a memory."""
    modules: dict[str, nn.Module] = field(default_factory=dict)
    """One of each tier, as it was built: every device trains in a copy."""

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Alg. 1, lines 5-15, one device after the other."""
        for device in active:
            yield self.attempt(round_number, device, sent)

    def attempt(self, round_number: int, device: int, sent: Sent, learned: LocalResult | None = None) -> Reply:
        """Alg. 2 on one device, unless it was trained elsewhere; an error is a failure of this device alone."""
        try:
            context = self.local_context(device, sent)
            learned = learned or self.train_locally(round_number, device, sent, context)
            return self.make_update(
                device, learned.weights, learned.loss, context, learned.steps * self.lr(round_number)
            )
        except Exception as error:
            return Failure(device, describe_device_error(error))

    def train_locally(self, round_number: int, device: int, sent: Sent, context: LocalContext) -> LocalResult:
        """Alg. 2 on one device."""
        population, tier = self.population, self.population.tier_of[device]
        module = self.copy_module(tier)
        load_weights(module, sent.models[tier])
        correction, mask = population.local.correction(context), self.logit_mask(device)
        lr = self.lr(round_number)
        problem = LocalProblem(
            population.objectives[tier], population.config.training, lr, correction, mask, population.precision
        )
        # A model's own randomness, like dropout, has an address too.
        address = population.config.seed, "model", round_number, population.first + device
        with (
            torch_threads(threads_per_worker(population.config.runtime)),
            seeds.randomness(*address),
            fast_convolutions(module),
        ):
            loss, steps = train_locally(module, self.batches(round_number, device), problem)
        trained = module.state_dict()
        return LocalResult({n: trained[n].contiguous() for n in population.holdings[tier].shapes}, loss, steps)

    def make_update(self, device: int, weights: Weights, loss: float, context: LocalContext, total_lr: float) -> Update:
        """What a device sends back when it has trained, `total_lr` being its steps times the learning rate."""
        population, tier = self.population, self.population.tier_of[device]
        update = Update(
            device,
            tier,
            weights,
            population.holdings[tier].trained,
            samples=len(population.data.shards[device]),
            loss=loss,
            rows=self.label_rows(device, weights),
            omega=population.omega[device],
        )
        return self.store_memory(update, context, total_lr)

    def local_context(self, device: int, sent: Sent) -> LocalContext:
        """What the local variant knows of the device in this round."""
        return self.population.local_context(device, sent, self.memory.get(device, {}))

    def store_memory(self, update: Update, context: LocalContext, total_lr: float) -> Update:
        """Keep the device's new memory, unless the server will drop the update, and tell by how much it changed."""
        if self.population.local.remember is None or not is_finite(update.weights):
            return update
        memory, infer_change = (
            self.population.local.remember(context, update.weights, total_lr),
            self.population.local.infer_change,
        )
        if infer_change is not None:
            change = infer_change(context.received, update.weights)
        else:
            change = {n: t - context.memory[n] if n in context.memory else t for n, t in memory.items()}
        # Last: a device that fails before this remembers what it did.
        self.memory[update.device] = memory
        return replace(update, memory_change=change)

    def lr(self, round_number: int) -> float:
        """η in that round."""
        return learning_rate(self.population.config.training, round_number, self.population.config.rounds)

    def plan_batches(self, round_number: int, device: int) -> Visits:
        """Which examples the device visits in that round, in which order."""
        config, shard = self.population.config, self.population.data.shards[device]
        training, address = config.training, (config.seed, round_number, self.population.first + device)
        return plan_visits(shard, training.epochs, training.batch_size, training.last_batch == "drop", address)

    def batches(self, round_number: int, device: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The device's batches of all epochs."""
        plan, augmentation = self.plan_batches(round_number, device), self.population.config.data.augmentation
        return (make_batch(self.population.data, plan, part, augmentation) for part in plan.batches())

    def logit_mask(self, device: int) -> partial[Sequence[Tensor]]:
        """With `training.masked_loss`, the logits of classes that the device does not hold are 0 in its loss."""
        if not self.population.config.training.masked_loss:
            return partial(lambda logits: logits)
        return partial(mask_logits, present=self.population.data.present(device))

    def label_rows(self, device: int, weights: Weights) -> dict[str, Tensor]:
        """With `server.rows_by_class`, the output rows of the classes that the device holds."""
        if not self.population.config.server.rows_by_class:
            return {}
        return {
            name: self.population.data.present(device) for name in weights if name in self.population.family.outputs
        }

    def copy_module(self, tier: str) -> nn.Module:
        """A module for one device: whatever it changes in itself, the next device starts from a new one."""
        try:
            return copy.deepcopy(self.built_module(tier))
        except Exception:
            # Some modules cannot be copied, as those with torch's older weight_norm.
            return self.build_module(tier)

    def built_module(self, tier: str) -> nn.Module:
        """The module of that tier as it was built."""
        if tier not in self.modules:
            self.modules[tier] = self.build_module(tier)
        return self.modules[tier]

    def unsaved_buffers(self, tier: str) -> Weights:
        """Buffers that a module does not save: every device starts from them as they were built."""
        module = self.built_module(tier)
        saved = module.state_dict()
        return {name: buffer for name, buffer in module.named_buffers() if name not in saved}

    def build_module(self, tier: str) -> nn.Module:
        """A module of that tier, always the same."""
        population, data = self.population, self.population.data
        with seeds.randomness(population.config.seed, "initial weights"):
            module = population.family.build(tier).to(data.x.device)
        return apply_image_layout(
            module, data.inputs(data.x[:2]), population.precision, population.config.training.batch_size
        )
