"""The GPU engine: every active device trains on a stream of its own, a step being one launch of a captured CUDA graph.

The device's weights lie in one flat vector, its gradient in another; correction, clip, decay and step are two updates.
Products read a bf16 copy of the weights, which the update writes beside them. Batches, crops and order are the plain
runtime's: all of a device's inputs for the round are made in one go and the steps walk through them.
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
from fedhen.engines.cuda.slots import Slot, living
from fedhen.engines.cuda.waves import Waves
from fedhen.engines.sequential import SequentialDevices


@dataclass
class GraphDevices:
    """The devices of a simulated fleet on one GPU, side by side."""

    plain: SequentialDevices

    def __post_init__(self) -> None:
        """What is left of an earlier run of this process is given back first."""
        self.waves = Waves(partial(Slot, self.plain), give_back)
        release()

    @property
    def memory(self) -> StateStore:
        """What each device remembers, where the local variant has a memory."""
        return self.plain.memory

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Alg. 1, lines 5-15: all active devices at once; those of a wave that fails one by one."""
        self.plain.fleet.precision.choose()
        # Deep tiers first, since their streams take longest.
        waiting: dict[str, list[int]] = {tier: [] for tier in reversed(list(self.plain.fleet.holdings))}
        for device in active:
            waiting[self.plain.fleet.tier_of[device]].append(device)
        apart = yield from self.waves.train(waiting, partial(self.try_wave, round_number, sent))
        for device in apart:
            yield self.plain.attempt(round_number, device, sent)

    def try_wave(self, number: int, sent: Sent, wave: Sequence[tuple[int, Slot]]) -> Iterator[Update]:
        """Train these devices; whatever the streams of a wave that fails still do must not meet what comes next."""
        try:
            yield from self.train_wave(number, sent, wave)
        except Exception:
            torch.cuda.synchronize()
            raise

    def train_wave(self, number: int, sent: Sent, wave: Sequence[tuple[int, Slot]]) -> Iterator[Update]:
        """Train these devices at the same time, each on its slot's stream."""
        plain, lr = self.plain, self.plain.lr(number)
        starts = {slot.tier: slot.layout.spread(slot.layout.gather(sent.models[slot.tier])) for _, slot in wave}
        plans = [(slot, plain.plan(number, device)) for device, slot in wave]
        for slot, plan in plans:
            slot.prepare(plan)
        now = torch.cuda.current_stream()
        visits = {}
        for device, slot in wave:
            visits[device] = plain.visit(device, sent)
            slot.stream.wait_stream(now)
            with torch.cuda.stream(slot.stream):
                slot.load(starts[slot.tier], sent.models[slot.tier], device, visits[device], lr)
        walks = [slot.walk(plan) for slot, plan in plans]
        while walks:
            # A step of each in turn, so that all streams have work from the start.
            walks = [walk for walk in walks if next(walk, None) is not None]
        trained = []
        for _, slot in wave:
            with torch.cuda.stream(slot.stream):
                trained.append(slot.weights(sent.models[slot.tier]))
            now.wait_stream(slot.stream)
        losses = torch.stack([slot.loss for _, slot in wave]).tolist() if wave else []
        for (device, _), (_, plan), weights, loss in zip(wave, plans, trained, losses, strict=True):
            steps = len(plan.ends)
            yield plain.update(device, weights, loss / steps, visits[device], steps * lr)


def release() -> None:
    """Give the memory of slots that are gone back to all."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def give_back() -> None:
    """That, and what the products of all streams work in, if no graph may still read it."""
    release()
    if not living:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
