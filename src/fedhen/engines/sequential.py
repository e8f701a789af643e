"""The sequential engine: trains the active devices one after the other. All other engines are compared with it.

On a CPU a device trains with `runtime.threads` torch threads, in its tier's module as it was built. So its result
depends on the round, the device and what it was sent, and not on the process or on what was trained before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedhen import seeds
from fedhen.algorithm.failures import describe_device_error
from fedhen.algorithm.local_training import LocalProblem, freeze, learning_rate, train_locally
from fedhen.algorithm.local_variants import NO_CORRECTION, Correction, LocalContext
from fedhen.algorithm.optimizers import Optimizer, Sgd, make_optimizer
from fedhen.algorithm.personal import PART, Phase, find_frozen
from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Failure, Reply, Update
from fedhen.data.batches import Visits, make_batch, plan_visits
from fedhen.data.inputs import Inputs
from fedhen.devices.population import COPY, Population
from fedhen.devices.population import PART as KEPT_PART
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
    kept: Mapping[str, Tensor] = {}
    """What of it the device keeps: the state of its optimiser, and what is personal."""


class Occasion(NamedTuple):
    """When and why a device trains: its random choices follow from it."""

    round: int
    device: int
    purpose: tuple[str, ...] = ()
    """Empty for the training of a round."""


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
        load_weights(module, {**sent.models[tier], **strip_prefix(KEPT_PART, context.memory)})
        correction, training = population.local.correction(context), population.config.training
        lr, personal = self.lr(round_number), population.holdings[tier].tuned
        optimizer = make_optimizer(training, lr, correction.decay, uncorrected=personal)
        if like := population.optimizer_like(tier, context.received):
            optimizer.load(dict(module.named_parameters()), context.memory)
        occasion = Occasion(round_number, device)
        loss, steps = self.train_phases(module, population.personal.training, occasion, correction, optimizer)
        trained = module.state_dict()
        weights = take_copies(trained, population.holdings[tier].shapes)
        part = take_copies(trained, population.holdings[tier].personal if population.personal.keeps_part else ())
        kept = {KEPT_PART + name: tensor for name, tensor in part.items()}
        copied = self.train_copy(occasion, sent.models[tier], context.memory)
        return LocalResult(weights, loss, steps, {**optimizer.keep(like), **kept, **copied})

    def train_copy(self, occasion: Occasion, model: Weights, memory: Mapping[str, Tensor]) -> Weights:
        """Trains the copy that the device keeps beside the server's model, and returns it; nothing without a copy."""
        if not (phases := self.population.personal.copy):
            return {}
        module = self.modules.take(self.population.tier_of[occasion.device])
        load_weights(module, {**model, **strip_prefix(COPY, memory)})
        self.train_phases(module, phases, occasion._replace(purpose=("copy",)), pulled_to=model)
        return {COPY + name: tensor for name, tensor in take_copies(module.state_dict(), model).items()}

    def train_phases(
        self,
        module: nn.Module,
        phases: Sequence[Phase],
        occasion: Occasion,
        correction: Correction = NO_CORRECTION,
        optimizer: Optimizer | None = None,
        pulled_to: Weights | None = None,
    ) -> tuple[float, int]:
        """Trains a module of the device in place, one phase after the other.

        Returns the mean loss of all steps, and the number of those that train what is shared. The optimiser is the
        configured one, without state, unless one is given.
        """
        config, done = self.population.config, list[tuple[Phase, float, int]]()
        part = self.population.parts[self.population.tier_of[occasion.device]]
        # Random choices of the model, such as dropout, have an address too.
        random = self.population.streams_of(occasion.round, occasion.device).randomness("model", *occasion.purpose)
        with torch_threads(threads_per_worker(config.runtime)), random, fast_convolutions(module):
            for number, phase in enumerate(phases):
                frozen = find_frozen(phase.trains, module, part)
                if frozen.issuperset(name for name, p in module.named_parameters() if p.requires_grad):
                    continue
                each = correction if pulled_to is None else pull_to(pulled_to, phase.pull)
                problem = self.make_problem(phase, occasion, each)
                step = self.prepare_optimizer(phase, problem, optimizer)
                with freeze(module, frozen):
                    done.append((phase, *train_locally(module, self.batches(occasion, phase, number), problem, step)))
        shared, total = sum(n for phase, _, n in done if phase.trains != PART), sum(n for _, _, n in done)
        # A single mean is taken as it is: weighted and divided again it would be rounded.
        loss = done[0][1] if len(done) == 1 else sum(loss * n for _, loss, n in done) / max(total, 1)
        return loss, shared

    def make_problem(self, phase: Phase, occasion: Occasion, correction: Correction) -> LocalProblem:
        """Returns what the device minimises in a phase."""
        population = self.population
        return LocalProblem(
            population.objectives[population.tier_of[occasion.device]],
            population.config.training,
            phase.lr or self.lr(occasion.round),
            correction,
            self.logit_mask(occasion.device),
            population.precision,
            phase.gradient,
            clips=not phase.plain,
        )

    def prepare_optimizer(self, phase: Phase, problem: LocalProblem, optimizer: Optimizer | None) -> Optimizer:
        """Returns the optimiser of a phase: a given one continues with the phase's learning rate."""
        if phase.plain:
            return Sgd(problem.lr)
        if optimizer is None:
            return make_optimizer(problem.training, problem.lr, problem.correction.decay)
        optimizer.lr = problem.lr
        return optimizer

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
        stream = self.population.streams_of(round_number, device).stream("wire")
        return torch.from_numpy(stream.random(number, dtype=np.float32))

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
        self.memory[update.device] = {**memory, **result.kept, **unsent}
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
        config = self.population.config
        return learning_rate(config.training, round_number, config.rounds) * self.population.personal.factor

    def plan_batches(
        self, round_number: int, device: int, phase: Phase | None = None, purpose: tuple[str | int, ...] = ()
    ) -> Visits:
        """Returns which examples the device trains on in a phase of that round, in order; by default in the first."""
        config, shard = self.population.config, self.population.data.shards[device]
        training, streams = config.training, self.population.streams_of(round_number, device)
        phase = phase or self.population.personal.training[0]
        drops = training.last_batch == "drop"
        visits = plan_visits(shard, phase.epochs, training.batch_size, drops, streams, phase.max_steps, purpose)
        return visits if self.population.counted is None else visits.only(self.population.counted)

    def batches(self, occasion: Occasion, phase: Phase, number: int) -> Iterator[tuple[Inputs, Tensor]]:
        """Returns the device's batches of all epochs of a phase; `number` counts the phases of an occasion."""
        purpose: tuple[str | int, ...] = (*occasion.purpose, number) if number else occasion.purpose
        plan = self.plan_batches(occasion.round, occasion.device, phase, purpose)
        augmentation = self.population.config.data.augmentation
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
    with seeds.randomness(population.streams.initial, "initial weights"):
        module = population.family.build(tier).to(data.device)
    load_weights(module, {**population.fixed.get(tier, {}), **population.unsent.get(tier, {})})
    return apply_image_layout(module, data.sample()[0], population.precision, population.config.training.batch_size)


def take_copies(weights: Mapping[str, Tensor], names: Iterable[str]) -> Weights:
    """Returns copies of these weights, since the next device trains in the same module."""
    return {name: weights[name].clone(memory_format=torch.contiguous_format) for name in names}


def strip_prefix(prefix: str, kept: Mapping[str, Tensor]) -> Weights:
    """Returns the weights that a device keeps under that prefix, by their own names."""
    return {name.removeprefix(prefix): tensor for name, tensor in kept.items() if name.startswith(prefix)}


def pull_to(model: Weights, pull: float) -> Correction:
    """Returns what λ/2·‖v − w‖² adds to the gradient of v."""
    return Correction({name: -pull * tensor for name, tensor in model.items()}, pull=pull) if pull else NO_CORRECTION
