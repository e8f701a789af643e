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
from fedhen.algorithm.local_variants import Visit
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
    """The devices of a simulated fleet; their data lies where they train."""

    fleet: Population
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
            visit = self.visit(device, sent)
            learned = learned or self.learn(round_number, device, sent, visit)
            return self.update(device, learned.weights, learned.loss, visit, learned.steps * self.lr(round_number))
        except Exception as error:
            return Failure(device, describe_device_error(error))

    def learn(self, round_number: int, device: int, sent: Sent, visit: Visit) -> LocalResult:
        """Alg. 2 on one device."""
        fleet, tier = self.fleet, self.fleet.tier_of[device]
        module = self.new_copy(tier)
        load_weights(module, sent.models[tier])
        correction, view = fleet.local.correction(visit), self.view(device)
        lr = self.lr(round_number)
        task = LocalProblem(fleet.objectives[tier], fleet.config.training, lr, correction, view, fleet.precision)
        # A model's own randomness, like dropout, has an address too.
        address = fleet.config.seed, "model", round_number, fleet.first + device
        with (
            torch_threads(threads_per_worker(fleet.config.runtime)),
            seeds.randomness(*address),
            fast_convolutions(module),
        ):
            loss, steps = train_locally(module, self.batches(round_number, device), task)
        trained = module.state_dict()
        return LocalResult({n: trained[n].contiguous() for n in fleet.holdings[tier].shapes}, loss, steps)

    def update(self, device: int, weights: Weights, loss: float, visit: Visit, walked: float) -> Update:
        """What a device sends back when it has trained, `walked` being its steps times the learning rate."""
        fleet, tier = self.fleet, self.fleet.tier_of[device]
        update = Update(
            device,
            tier,
            weights,
            fleet.holdings[tier].trained,
            samples=len(fleet.data.shards[device]),
            loss=loss,
            rows=self.rows(device, weights),
            omega=fleet.omega[device],
        )
        return self.remember(update, visit, walked)

    def visit(self, device: int, sent: Sent) -> Visit:
        """What the local variant knows of the device in this round."""
        return self.fleet.visit(device, sent, self.memory.get(device, {}))

    def remember(self, update: Update, visit: Visit, walked: float) -> Update:
        """Keep the device's new memory, unless the server will drop the update, and tell by how much it changed."""
        if self.fleet.local.remember is None or not is_finite(update.weights):
            return update
        memory, known = self.fleet.local.remember(visit, update.weights, walked), self.fleet.local.known
        if known is not None:
            changed = known(visit.received, update.weights)
        else:
            changed = {n: t - visit.memory[n] if n in visit.memory else t for n, t in memory.items()}
        # Last: a device that fails before this remembers what it did.
        self.memory[update.device] = memory
        return replace(update, remembered=changed)

    def lr(self, round_number: int) -> float:
        """η in that round."""
        return learning_rate(self.fleet.config.training, round_number, self.fleet.config.rounds)

    def plan(self, round_number: int, device: int) -> Visits:
        """Which examples the device visits in that round, in which order."""
        config, shard = self.fleet.config, self.fleet.data.shards[device]
        training, address = config.training, (config.seed, round_number, self.fleet.first + device)
        return plan_visits(shard, training.epochs, training.batch_size, training.last_batch == "drop", address)

    def batches(self, round_number: int, device: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The device's batches of all epochs."""
        plan, augmentation = self.plan(round_number, device), self.fleet.config.data.augmentation
        return (make_batch(self.fleet.data, plan, part, augmentation) for part in plan.batches())

    def view(self, device: int) -> partial[Sequence[Tensor]]:
        """With `training.masked_loss`, the logits of classes that the device does not hold are 0 in its loss."""
        if not self.fleet.config.training.masked_loss:
            return partial(lambda logits: logits)
        return partial(mask_logits, present=self.fleet.data.present(device))

    def rows(self, device: int, weights: Weights) -> dict[str, Tensor]:
        """With `server.rows_by_class`, the output rows of the classes that the device holds."""
        if not self.fleet.config.server.rows_by_class:
            return {}
        return {name: self.fleet.data.present(device) for name in weights if name in self.fleet.family.outputs}

    def new_copy(self, tier: str) -> nn.Module:
        """A module for one device: whatever it changes in itself, the next device starts from a new one."""
        try:
            return copy.deepcopy(self.module(tier))
        except Exception:
            # Some modules cannot be copied, as those with torch's older weight_norm.
            return self.new_module(tier)

    def module(self, tier: str) -> nn.Module:
        """The module of that tier as it was built."""
        if tier not in self.modules:
            self.modules[tier] = self.new_module(tier)
        return self.modules[tier]

    def constants(self, tier: str) -> Weights:
        """Buffers that a module does not save: every device starts from them as they were built."""
        module = self.module(tier)
        saved = module.state_dict()
        return {name: buffer for name, buffer in module.named_buffers() if name not in saved}

    def new_module(self, tier: str) -> nn.Module:
        """A module of that tier, always the same."""
        fleet, data = self.fleet, self.fleet.data
        with seeds.randomness(fleet.config.seed, "initial weights"):
            module = fleet.family.build(tier).to(data.x.device)
        return apply_image_layout(module, data.inputs(data.x[:2]), fleet.precision, fleet.config.training.batch_size)
