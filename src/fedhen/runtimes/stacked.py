"""The fast runtime on a CPU: the active devices of a tier train as one network, and two such networks side by side."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedhen.algorithm.local import Visit
from fedhen.algorithm.merging import Reply
from fedhen.cores import LARGE, operations, side_by_side
from fedhen.data.batches import batch
from fedhen.errors import UserError
from fedhen.params import Weights, select
from fedhen.rounds import Sent
from fedhen.runtimes.plain import Fleet, PlainDevices
from fedhen.runtimes.stack_training import Stack, StackTask, per_device, ticks
from fedhen.runtimes.stack_trial import CannotStack, stacked
from fedhen.runtimes.stacking import Stacked
from fedhen.shelf import Shelf

HEAVY = 1e6
"""A model of so many weights is bound by memory: a stack of it gains nothing, and loses the caches."""
WORTH_A_THREAD = 1e7
"""Devices whose forward passes together have fewer operations than this are not dealt to two threads."""
ALWAYS = 2e6
"""A step of a stack costs as much as so many operations of a forward pass for every tensor of weights, and what its
devices need on top."""
PIECES = 2
"""Into how many parts of like cost the devices of a round are dealt. Fixed: sums must not depend on the machine."""


class Job(NamedTuple):
    """Devices of a tier that train as one network."""

    tier: str
    piece: int
    devices: tuple[int, ...]


class Trained(NamedTuple):
    """What came of a device."""

    device: int
    weights: Weights
    loss: float
    visit: Visit
    walked: float


@dataclass
class StackedDevices:
    """The devices of a simulated fleet on a CPU; what cannot be stacked the plain runtime trains."""

    plain: PlainDevices
    stacks: dict[tuple[str, int], Stacked | None] = field(default_factory=dict)
    """One a tier and piece; none where a tier's devices train one after the other."""
    costs: dict[str, float] = field(default_factory=dict)
    """Tier -> the operations of its forward pass on one example."""

    @property
    def fleet(self) -> Fleet:
        """The devices' data and tasks."""
        return self.plain.fleet

    @property
    def memory(self) -> Shelf:
        """What each device remembers, where the local variant has a memory."""
        return self.plain.memory

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Alg. 1, lines 5-15: first the stacks, side by side, then the devices that train one by one."""
        apart = [device for device in active if self.stack(self.fleet.tier_of[device], 0) is None]
        jobs = self.jobs(sorted({*active} - {*apart}))
        work = partial(self.try_stack, round_number, sent)
        for job, trained in zip(jobs, side_by_side(work, jobs, self.fleet.config.runtime.threads or 1), strict=True):
            # One by one it shows whose fault it was, and the others come back.
            apart += [] if trained else job.devices
            for one in trained:
                yield self.plain.update(*one)
        for device in apart:
            yield self.plain.attempt(round_number, device, sent)

    def jobs(self, devices: Sequence[int]) -> list[Job]:
        """The devices in stacks, the costliest first."""
        tier_of, shards, size = self.fleet.tier_of, self.fleet.data.shards, self.fleet.config.training.batch_size
        each = {device: self.costs[tier_of[device]] * len(shards[device]) for device in devices}
        tensors = {tier: len(held.learned) for tier, held in self.fleet.holdings.items()}
        once = {d: ALWAYS * tensors[tier_of[d]] * -(-len(shards[d]) // size) for d in devices}
        costs = Costs(tier_of, each, once)
        at_once = sum(self.costs[tier_of[device]] for device in devices) * size
        jobs: dict[Job, float] = {}
        for piece, members in enumerate(dealt(costs, PIECES if at_once > WORTH_A_THREAD else 1)):
            for tier in {tier_of[device]: None for device in members}:
                own = tuple(device for device in members if tier_of[device] == tier)
                jobs[Job(tier, piece, own)] = sum(each[device] for device in own)
        for job in jobs:
            self.stack(job.tier, job.piece)
        return sorted(jobs, key=lambda job: -jobs[job])

    def try_stack(self, round_number: int, sent: Sent, job: Job) -> list[Trained]:
        """What came of the devices of a stack; nothing where one of them made it fail."""
        try:
            return self.train_stack(round_number, sent, job)
        except UserError:
            raise
        except Exception:
            return []

    def train_stack(self, round_number: int, sent: Sent, job: Job) -> list[Trained]:
        """Alg. 2 on the devices of a stack."""
        fleet, config, lr = self.fleet, self.fleet.config, self.plain.lr(round_number)
        held, built = fleet.holdings[job.tier], self.stacks[job.tier, job.piece]
        assert built is not None
        losses = per_device(fleet.objectives[job.tier], config.training.masked_loss)
        task = StackTask(built, losses, held.learned, config.training, lr, fleet.precision)
        visits = [self.plain.visit(device, sent) for device in job.devices]
        start = {**dict(self.plain.modules[job.tier].named_parameters()), **sent.models[job.tier]}
        stack = Stack(task, start, [fleet.local.correction(visit) for visit in visits])
        present = [fleet.data.present(device) for device in job.devices]
        found: list[list[Tensor]] = [[] for _ in job.devices]
        for rows, plan in ticks([self.plain.plan(round_number, device) for device in job.devices]):
            inputs, labels = batch(fleet.data, plan, slice(None), config.data.augmentation)
            ordered = inputs.view(-1, len(rows), *inputs.shape[1:]), labels.view(-1, len(rows))
            losses_now = stack.step(rows, ordered, torch.stack([present[row] for row in rows]))
            for row, loss in zip(rows, losses_now, strict=True):
                found[row].append(loss)
        return [
            Trained(
                device,
                select(stack.weights_of(row), held.shapes),
                float(torch.stack(found[row]).mean()),
                visits[row],
                len(found[row]) * lr,
            )
            for row, device in enumerate(job.devices)
        ]

    def stack(self, tier: str, piece: int) -> Stacked | None:
        """The network that a piece's devices of a tier train as, if there is one."""
        if (tier, piece) not in self.stacks:
            self.stacks[tier, piece] = self.built(tier)
        return self.stacks[tier, piece]

    def built(self, tier: str) -> Stacked | None:
        """A new one, unless the tier's model is large or cannot be stacked."""
        data, module = self.fleet.data, self.plain.new_module(tier)
        sample = data.inputs(data.x[:2]), data.y[:2]
        if tier not in self.costs:
            self.costs[tier] = operations(self.plain.module(tier), sample[0])
        weights = sum(parameter.numel() for parameter in module.parameters())
        if self.costs[tier] * self.fleet.config.training.batch_size > LARGE or weights > HEAVY:
            return None
        try:
            return stacked(module, self.fleet.objectives[tier], sample)
        except CannotStack as reason:
            warnings.warn(f"tier {tier!r} is trained one device at a time: {reason}", stacklevel=2)
            return None


@dataclass(frozen=True)
class Costs:
    """Of devices that train in stacks."""

    tier_of: Sequence[str]
    each: Mapping[int, float]
    """Of a device by itself."""
    once: Mapping[int, float]
    """Of a stack that has the device, however many others it has."""


def dealt(costs: Costs, pieces: int) -> list[list[int]]:
    """The devices in parts of like cost, in their order: dealt one by one, or a tier at a time if that is cheaper."""
    tiers: dict[str, list[int]] = {}
    for device in costs.each:
        tiers.setdefault(costs.tier_of[device], []).append(device)
    ways = [_dealt(costs, hands, pieces) for hands in ([[device] for device in costs.each], [*tiers.values()])]
    return min(ways)[1]


def _dealt(costs: Costs, hands: Sequence[Sequence[int]], pieces: int) -> tuple[float, list[list[int]]]:
    """Hands of a tier each, the costliest first, to where it ends up cheapest; and what the dearest part costs."""
    parts: list[list[int]] = [[] for _ in range(pieces)]
    loads, stacks = [0.0] * pieces, [dict[str, float]() for _ in range(pieces)]
    own = {tuple(hand): sum(costs.each[device] for device in hand) for hand in hands}
    for hand in sorted(own, key=lambda hand: -own[hand]):
        tier, once = costs.tier_of[hand[0]], max(costs.once[device] for device in hand)
        more = [max(once - had.get(tier, 0.0), 0.0) for had in stacks]
        after = [load + own[hand] + stack for load, stack in zip(loads, more, strict=True)]
        best = after.index(min(after))
        loads[best] = after[best]
        stacks[best][tier] = max(stacks[best].get(tier, 0.0), once)
        parts[best] += hand
    return max(loads), [sorted(part) for part in parts]
