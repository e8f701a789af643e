"""The population: what each device has, holds and minimises."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from fedhen import seeds
from fedhen.algorithm.holdings import Holding, find_holdings
from fedhen.algorithm.local_variants import LocalContext, LocalVariant, make_local_variant
from fedhen.algorithm.methods import Method
from fedhen.algorithm.objectives import Objective, configure_objective
from fedhen.algorithm.optimizers import kept_state_like
from fedhen.algorithm.parts import Parts, find_parts, withhold
from fedhen.algorithm.personal import Personal
from fedhen.algorithm.rounds import Sent
from fedhen.config.settings import Config
from fedhen.data.augmentation import Coins
from fedhen.data.dataset import Data
from fedhen.devices.personal_choice import choose_held_out, choose_personal
from fedhen.errors import ConfigError, DataError, unknown_name
from fedhen.hardware.precision import Precision, choose_precision
from fedhen.models.family import Family
from fedhen.params import TierModels, Weights, numel, select
from fedhen.seeds import DeviceStreams, RunStreams, Streams
from fedhen.tasks import Classification, Regression, Task
from fedhen.tasks.registry import make_task
from fedhen.wire.wire import Wire, make_wires

PART, COPY = "personal/", "copy/"
"""What a device keeps of its personal part, and of its second copy, has this before the weights' names."""


@dataclass(frozen=True)
class Population:
    """All that is fixed before the first round: settings, method, models, data and devices."""

    config: Config
    method: Method
    family: Family
    task: Task
    data: Data
    """On the accelerator, dealt to the devices."""
    tier_of: Sequence[str]
    """The tier of each device."""
    holdings: Mapping[str, Holding]
    """What the devices of each tier hold."""
    objectives: Mapping[str, Objective]
    """What the devices of each tier minimise."""
    local: LocalVariant
    wires: Mapping[str, Wire]
    """What is sent between the server and the devices of each tier."""
    omega: Sequence[float]
    """Each device's share of its pool's data; 1 if all have the same."""
    precision: Precision
    personal: Personal
    parts: Parts
    """The personal weights of each tier."""
    examples: Sequence[int] = ()
    """The number of training examples of each device; empty on a node of a real fleet."""
    fixed: TierModels = field(default_factory=dict)
    """Tier -> the weights that no device trains. They are loaded when a module is built."""
    unsent: TierModels = field(default_factory=dict)
    """Tier -> the initial values of the weights that never travel, loaded likewise."""
    held_out: frozenset[int] = frozenset()
    """The devices that never train."""
    outputs: int = 0
    """The number of outputs of a model of a named family; in classification, of classes."""
    validation: Data | None = None
    """Data whose test examples are the held-out training examples, if there are any."""
    streams: Streams = RunStreams(0)
    """Where the random choices of server and devices come from."""

    @cached_property
    def counted(self) -> Coins | None:
        """Which training examples have a target that counts, or None if all have."""
        counted = self.task.counted(self.data.y)
        found = None if counted is None else counted.flatten(1).any(1).cpu().numpy()
        return None if found is None or found.all() else found

    @property
    def tier_sizes(self) -> dict[str, int]:
        """Tier -> the number of its devices that train."""
        training = [tier for device, tier in enumerate(self.tier_of) if device not in self.held_out]
        return {tier: training.count(tier) for tier in self.config.tiers}

    def with_devices(self, tier_of: Sequence[str], examples: Sequence[int]) -> Population:
        """Returns the population with these devices, each of a tier and with a number of examples."""
        omega = compute_omega(examples, tier_of, self.method.pools(tuple(self.config.tiers)))
        return replace(self, tier_of=tier_of, examples=examples, omega=omega)

    def cost(self, device: int) -> int:
        """How long a device trains, in parameters times examples."""
        training = self.config.training
        examples = len(self.data.shards[device]) * training.epochs
        if training.max_steps:
            examples = min(examples, training.max_steps * training.batch_size)
        return numel(self.holdings[self.tier_of[device]].shapes) * examples

    @property
    def keeps_state(self) -> bool:
        """Whether devices keep anything from one of their rounds to the next."""
        kept = self.local.remember is not None or self.config.training.optimizer_state == "device"
        return kept or self.personal.keeps or any(wire.keeps_rest for wire in self.wires.values())

    def state_like(self, tier: str, weights: Mapping[str, Tensor]) -> Weights:
        """Returns tensors with the names, shapes and types of what a device of a tier keeps between its rounds.

        That is the local variant's memory, the optimiser's state, what is personal and what a codec has not sent yet,
        and nothing if there is none of them. `weights` are those of the tier; the values are not used.
        """
        memory = self.select_learned(tier, weights) if self.local.remember is not None else {}
        return {**memory, **self.trained_like(tier, weights), **self.wires[tier].kept_like(weights)}

    def trained_like(self, tier: str, weights: Mapping[str, Tensor]) -> Weights:
        """Returns the part of `state_like` that training itself changes: of the optimiser, and what is personal."""
        return {**self.optimizer_like(tier, weights), **self.personal_like(tier, weights)}

    def optimizer_like(self, tier: str, weights: Mapping[str, Tensor]) -> Weights:
        """Returns the optimiser's part of `state_like`."""
        tuned = {n: t for n, t in self.unsent.get(tier, {}).items() if n in self.holdings[tier].tuned}
        return kept_state_like(self.config.training, {**self.select_learned(tier, weights), **tuned})

    def personal_like(self, tier: str, weights: Mapping[str, Tensor]) -> Weights:
        """Returns the personal part of `state_like`."""
        part = self.unsent.get(tier, {}) if self.personal.keeps_part else {}
        copied = {n: t for n, t in weights.items() if n in self.holdings[tier].shapes} if self.personal.copy else {}
        return {PART + n: t for n, t in part.items()} | {COPY + n: t for n, t in copied.items()}

    def complete(self, tier: str, weights: Weights) -> Weights:
        """Returns a model with what does not travel: the weights that no device trains, and unsent ones as at first."""
        return {**self.fixed.get(tier, {}), **self.unsent.get(tier, {}), **weights}

    def place_unsent(self, seed_weights: Weights) -> Population:
        """Returns the population with the initial values of the weights that never travel."""
        unsent = {tier: select(seed_weights, holding.personal) for tier, holding in self.holdings.items()}
        return replace(self, unsent={tier: weights for tier, weights in unsent.items() if weights})

    @property
    def run_streams(self) -> RunStreams:
        """The random streams of the whole run, which only a server and a simulation have."""
        assert isinstance(self.streams, RunStreams)
        return self.streams

    def streams_of(self, round_number: int, device: int) -> DeviceStreams:
        """Returns the random streams of a device in a round."""
        return self.streams.of_device(round_number, device)

    def select_learned(self, tier: str, weights: Mapping[str, Tensor]) -> Weights:
        """Returns the weights that the loss of a tier's devices reaches."""
        return {n: t for n, t in weights.items() if n in self.holdings[tier].learned}

    def local_context(self, device: int, sent: Sent, memory: Weights) -> LocalContext:
        """Returns what the local variant is given for a device that keeps this state."""
        tier = self.tier_of[device]
        trained = self.select_learned(tier, sent.models[tier])
        return LocalContext(trained, memory, sent.mean.get(tier, {}), self.omega[device])


def make_population(
    config: Config,
    family: Family,
    method: Method,
    data: Data,
    *,
    tier_of: Sequence[str],
    omega: Sequence[float],
    examples: Sequence[int] = (),
    task: Task | None = None,
    outputs: int = 0,
    validation: Data | None = None,
    streams: Streams | None = None,
    checked: bool = False,
) -> Population:
    """Checks that settings, models and data fit together, and finds what the devices of each tier hold.

    `data` lies on the accelerator. `checked` says that the family was checked before, as the server of a fleet does
    for its nodes. By default all random choices follow from the seed.
    """
    tiers, streams = tuple(config.tiers), streams or RunStreams(config.seed)
    if tiers != tuple(tier for tier in family.tiers if tier in tiers):
        raise ConfigError(
            f"tiers names {', '.join(tiers)}, but the family has, in this order, {', '.join(family.tiers)}"
        )
    if config.server.rows_by_class and not family.outputs:
        raise ConfigError("server.rows_by_class needs a family that names its outputs: Family(..., outputs=...)")
    with seeds.randomness(streams.initial, "initial weights"):
        module = family.build(tiers[-1])
    data, validation = data.in_type_of(module), validation and validation.in_type_of(module)
    images = isinstance(data.x, torch.Tensor) and len(data.shape) == 3
    if config.data.augmentation != "none" and not images:
        raise ConfigError(
            f"data.augmentation={config.data.augmentation} needs images, found inputs of shape {data.shape}"
        )
    task = task or make_task(config.task)
    check_task(task, data, config)
    if not checked:
        inputs, targets = data.to(torch.device("cpu")).sample()
        family.check(inputs, partial(check_exit, task, targets, data.classes or outputs))
    for name in config.objective.exit_weights:
        if name not in family.tiers:
            raise unknown_name("exit in objective.exit_weights", name, family.tiers)
    objectives = {t: configure_objective(method.objective, family.exits(t), config.objective, task) for t in tiers}
    holdings = find_holdings(family, objectives, method.pools, data.sample())
    personal = choose_personal(config, task, data.classes or outputs)
    parts = find_parts(family, holdings, personal, data.sample())
    if not personal.sends_part:
        holdings = withhold(holdings, parts, method.pools(tiers), personal.part)
    return Population(
        config=config,
        method=method,
        family=family,
        task=task,
        data=data,
        tier_of=tier_of,
        holdings=holdings,
        objectives=objectives,
        local=make_local_variant(config.local),
        wires=make_wires(config.wire, {t: h.shapes for t, h in holdings.items()}, method.pools(tiers)),
        omega=omega,
        examples=examples,
        precision=choose_precision(config.runtime.precision, data.device),
        personal=personal,
        parts=parts,
        outputs=outputs or data.classes,
        validation=validation,
        streams=streams,
        held_out=choose_held_out(config, tier_of),
    )


def check_exit(task: Task, targets: Tensor, classes: int, output: Tensor) -> str:
    """Returns which shape the output of an exit should have, or "" if it fits. Tries the task on it."""
    wrong = task.check_output(output, targets, classes)
    if not wrong:
        task.try_on(output, targets)
    return wrong


def check_task(task: Task, data: Data, config: Config) -> None:
    """Checks that targets and settings fit the task."""
    _ = task.scores
    for name, targets in (("training", data.y), ("test", data.y_test)):
        if wrong := task.check_targets(targets, data.classes):
            raise DataError(f"{name} data: {wrong}")
    words = [] if data.about is None else [name for name in data.about.class_names if not name.isdecimal()]
    if isinstance(task, Regression) and words:
        found = ", ".join(words[:5])
        raise DataError(f"the target is text ({found}), and the task is regression, which predicts numbers")
    if config.data.augmentation != "none" and data.y.dim() > 2:
        raise ConfigError(f"data.augmentation={config.data.augmentation} moves pixels, and the targets have pixels too")
    if config.evaluation.ensemble and type(task).combine is Task.combine:
        task.combine([])
    if config.objective.distillation and type(task).log_probabilities is Task.log_probabilities:
        task.log_probabilities(data.y)
    if not isinstance(task, Classification):
        for key, chosen in (
            ("training.masked_loss", config.training.masked_loss),
            ("server.rows_by_class", config.server.rows_by_class),
        ):
            if chosen:
                raise ConfigError(f"{key} needs classification, and the task is {task.name!r}: turn it off")


def assign_tiers(config: Config) -> list[str]:
    """Returns the tier of every device."""
    return config.tier_of_devices()


def compute_omega(
    sizes: Sequence[int], tier_of: Sequence[str], pools: Sequence[tuple[str, ...]], held_out: Collection[int] = ()
) -> list[float]:
    """Returns ω_i = n_i·N/n of every device, with N and n over the devices of its pool that are not held out."""
    omega = [1.0] * len(sizes)
    for pool in pools:
        members = [device for device, tier in enumerate(tier_of) if tier in pool and device not in held_out]
        total = sum(sizes[device] for device in members)
        for device in members:
            omega[device] = sizes[device] * len(members) / total
    return omega
