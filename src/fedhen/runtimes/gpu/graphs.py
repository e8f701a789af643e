"""The GPU engine: every active device trains on a stream of its own, a step being one launch of a captured CUDA graph.

The device's weights lie in one flat vector, its gradient in another; correction, clip, decay and step are two updates.
Products read a bf16 copy of the weights, which the update writes beside them. Batches, crops and order are the plain
runtime's: all of a device's inputs for the round are made in one go and the steps walk through them.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fedhen.algorithm.merging import Reply, Update
from fedhen.errors import UserError
from fedhen.faults import OUT_OF_MEMORY, ran_out
from fedhen.rounds import Sent
from fedhen.runtimes.gpu.slots import CannotCapture, Slot, living
from fedhen.runtimes.plain import PlainDevices
from fedhen.shelf import Shelf

SLOTS = 16
"""Devices of a tier that train at the same time; more wait for the first to end."""


@dataclass
class GraphDevices:
    """The devices of a simulated fleet on one GPU, side by side."""

    plain: PlainDevices
    slots: dict[str, list[Slot]] = field(default_factory=dict)
    room: int = SLOTS
    """Slots of a tier that there is memory for, as far as is known."""
    refused: set[str] = field(default_factory=set)
    """Tiers that the plain runtime trains."""

    def __post_init__(self) -> None:
        """What is left of an earlier run of this process is given back first."""
        release()

    @property
    def memory(self) -> Shelf:
        """What each device remembers, where the local variant has a memory."""
        return self.plain.memory

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Alg. 1, lines 5-15: all active devices at once; those of a wave that fails one by one."""
        self.plain.fleet.precision.choose()
        waiting: dict[str, list[int]] = {}
        for device in active:
            waiting.setdefault(self.plain.fleet.tier_of[device], []).append(device)
        apart: list[int] = []
        while any(waiting.values()):
            wave = self.next_wave(waiting)
            for tier in waiting.keys() & self.refused:
                apart += waiting.pop(tier)
            back, ran_short = self.try_wave(round_number, sent, wave)
            yield from back
            left = [device for device, _ in wave if device not in {update.device for update in back}]
            # Their slots are not held any longer, so that some can be freed.
            del wave, back
            if ran_short:
                self.give_way()
                for device in reversed(left):
                    waiting[self.plain.fleet.tier_of[device]].insert(0, device)
            else:
                apart += left
        for device in apart:
            yield self.plain.attempt(round_number, device, sent)

    def next_wave(self, waiting: dict[str, list[int]]) -> list[tuple[int, Slot]]:
        """As many of the waiting as there are slots for; deep tiers first, since their streams take longest."""
        ready = [tier for tier in reversed(list(self.plain.fleet.holdings)) if waiting.get(tier)]
        for tier in ready:
            self.make_slots(tier, min(SLOTS, len(waiting[tier])))
        wave: list[tuple[int, Slot]] = []
        for tier in ready:
            if tier not in self.refused:
                pairs = list(zip(waiting[tier], self.slots[tier][:SLOTS], strict=False))
                del waiting[tier][: len(pairs)]
                wave += pairs
        return wave

    def make_slots(self, tier: str, number: int) -> None:
        """That many slots of a tier, captured at their first use, or as many as there is memory for."""
        slots = self.slots.setdefault(tier, [])
        while len(slots) < min(number, self.room) and tier not in self.refused:
            short = False
            try:
                slots.append(Slot(self.plain, tier, len(slots)))
            except (CannotCapture, torch.OutOfMemoryError) as reason:
                short = ran_out(reason)
                if not short:
                    self.refused.add(tier)
                    warnings.warn(f"tier {tier!r} is trained one device at a time: {reason}", stacklevel=2)
            if short:  # Here the error is gone, and what was begun can be freed.
                self.give_way()

    def give_way(self) -> None:
        """Half as many slots for every tier; less than one each cannot be.

        All are given up and made again when they are needed: most of what a slot takes is what its stream's products
        work in, and that can only be given back as a whole, when no graph reads it any longer.
        """
        self.room = max(map(len, self.slots.values())) // 2
        if self.room < 1:
            raise UserError(OUT_OF_MEMORY)
        for slots in self.slots.values():
            slots.clear()
        release()
        if not living:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def try_wave(self, number: int, sent: Sent, wave: Sequence[tuple[int, Slot]]) -> tuple[list[Update], bool]:
        """What came back of a wave, and whether the rest is missing for lack of memory."""
        back: list[Update] = []
        try:
            for update in self.train_wave(number, sent, wave):
                back.append(update)
        except UserError:
            raise
        except Exception as error:
            # Whatever the streams still do must not meet what comes next.
            torch.cuda.synchronize()
            return back, ran_out(error)
        return back, False

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
