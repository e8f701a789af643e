"""The GPU engine: every active device trains on a separate stream, with one launch of a CUDA graph for each step.

The device's weights are in one flat vector, and correction, clip, decay and step are two kernels over it. Products read
a bf16 copy of the weights, which the update writes as well. Batches, crops and their order are those of the sequential
engine: the inputs of all of a device's steps are prepared at once, and each step reads the next batch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Reply, Update
from fedhen.devices.state_store import StateStore
from fedhen.engines.cuda.slot_groups import SlotGroups
from fedhen.engines.cuda.slots import Slot, live_slots
from fedhen.engines.sequential import LocalResult, SequentialDevices


@dataclass
class GraphDevices:
    """The simulated devices on one GPU, trained in parallel."""

    sequential: SequentialDevices

    def __post_init__(self) -> None:
        self.groups = SlotGroups(partial(Slot, self.sequential), free_workspaces)
        # An earlier run of this process may have left memory reserved.
        free_unused()

    @property
    def memory(self) -> StateStore:
        """Device -> what it keeps between its rounds."""
        return self.sequential.memory

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Alg. 1, lines 5-15: all active devices at once. Devices of a group that fails train one by one."""
        self.sequential.population.precision.choose()
        # Deep tiers first, since they take longest.
        waiting: dict[str, list[int]] = {tier: [] for tier in reversed(list(self.sequential.population.holdings))}
        for device in active:
            waiting[self.sequential.population.tier_of[device]].append(device)
        apart = yield from self.groups.train(waiting, partial(self.try_group, round_number, sent))
        for device in apart:
            yield self.sequential.attempt(round_number, device, sent)

    def try_group(self, number: int, sent: Sent, group: Sequence[tuple[int, Slot]]) -> Iterator[Update]:
        """Trains these devices. If the group fails, waits until its streams are idle."""
        try:
            yield from self.train_group(number, sent, group)
        except Exception:
            torch.cuda.synchronize()
            raise

    def train_group(self, number: int, sent: Sent, group: Sequence[tuple[int, Slot]]) -> Iterator[Update]:
        """Trains these devices at the same time, each on its slot's stream."""
        sequential, lr = self.sequential, self.sequential.lr(number)
        starts = {slot.tier: slot.layout.scatter(slot.layout.gather(sent.models[slot.tier])) for _, slot in group}
        plans = [(slot, sequential.plan_batches(number, device)) for device, slot in group]
        for slot, plan in plans:
            slot.prepare(plan)
        now = torch.cuda.current_stream()
        contexts = {}
        for device, slot in group:
            contexts[device] = sequential.local_context(device, sent)
            slot.stream.wait_stream(now)
            with torch.cuda.stream(slot.stream):
                slot.load(starts[slot.tier], sent.models[slot.tier], device, contexts[device], lr)
        launches = [slot.launch_steps(plan) for slot, plan in plans]
        while launches:
            # One step of each device in turn, so that all streams have work from the start.
            launches = [launch for launch in launches if next(launch, None) is not None]
        trained = []
        for _, slot in group:
            with torch.cuda.stream(slot.stream):
                trained.append(slot.weights(sent.models[slot.tier]))
            now.wait_stream(slot.stream)
        losses = torch.stack([slot.loss for _, slot in group]).tolist() if group else []
        for (device, _), (_, plan), weights, loss in zip(group, plans, trained, losses, strict=True):
            result = LocalResult(weights, loss / len(plan.ends), len(plan.ends))
            yield sequential.make_update(number, device, result, contexts[device], sent)


def free_unused() -> None:
    """Frees the memory of deleted slots."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def free_workspaces() -> None:
    """Frees the memory of deleted slots and, if no graph can still read them, the workspaces of all streams."""
    free_unused()
    if not live_slots:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
