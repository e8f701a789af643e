"""Which devices train at the same time: as many of each tier as there is memory for, in wave after wave."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from fedhen.algorithm.updates import Update
from fedhen.errors import UserError
from fedhen.hardware.memory import OUT_OF_MEMORY, is_out_of_memory

MAX_SLOTS = 16
"""Devices of a tier that train at the same time; more wait for the first to end."""


class CannotCapture(Exception):
    """A tier's step cannot become a graph."""


class HasTier(Protocol):
    """Room for one device to train in, as far as this module looks at it."""

    @property
    def tier(self) -> str:
        """Whose devices fit."""


S = TypeVar("S", bound=HasTier)
Wave = Sequence[tuple[int, S]]
"""Devices that train at the same time, each in a slot."""


@dataclass
class Waves(Generic[S]):
    """Deals devices to slots, which are made when they are first needed and stay for later rounds."""

    make: Callable[[str, int], S]
    """A new slot of a tier, the how-manyth it is; raises where there is no memory for it, or CannotCapture."""
    free_memory: Callable[[], None]
    """Frees the memory of slots that are gone."""
    slots: dict[str, list[S]] = field(default_factory=dict)
    max_slots: int = MAX_SLOTS
    """Slots of a tier that there is memory for, as far as is known."""
    refused: set[str] = field(default_factory=set)
    """Tiers whose step cannot be captured."""

    def train(
        self, waiting: dict[str, list[int]], work: Callable[[Wave[S]], Iterator[Update]]
    ) -> Generator[Update, None, list[int]]:
        """Train what waits, by tier, those that take longest first; returns the devices that must train apart.

        These are the devices of refused tiers, and those that were not back when another of their wave failed.
        """
        apart: list[int] = []
        while any(waiting.values()):
            wave = self.next_wave(waiting)
            for tier in [tier for tier in waiting if tier in self.refused]:
                apart += waiting.pop(tier)
            back, short = _run_wave(work, wave)
            yield from back
            trained = {update.device for update in back}
            left = [(device, slot.tier) for device, slot in wave if device not in trained]
            # Their slots are not held any longer, so that they can be freed.
            del wave, back
            if short:
                self.halve_slots()
                for device, tier in reversed(left):
                    waiting[tier].insert(0, device)
            else:
                apart += [device for device, _ in left]
        return apart

    def next_wave(self, waiting: dict[str, list[int]]) -> list[tuple[int, S]]:
        """As many of the waiting as there are slots for."""
        ready = [tier for tier, devices in waiting.items() if devices]
        for tier in ready:
            self.make_slots(tier, len(waiting[tier]))
        wave: list[tuple[int, S]] = []
        for tier in ready:
            pairs = list(zip(waiting[tier], self.slots[tier], strict=False))
            del waiting[tier][: len(pairs)]
            wave += pairs
        return wave

    def make_slots(self, tier: str, number: int) -> None:
        """That many slots of a tier, or as many as there is memory for."""
        slots = self.slots.setdefault(tier, [])
        while len(slots) < (wanted := min(number, self.max_slots)) and tier not in self.refused:
            short = False
            try:
                slots.append(self.make(tier, len(slots)))
            except Exception as reason:
                short = is_out_of_memory(reason)
                if not short and not isinstance(reason, CannotCapture):
                    raise
                if not short:
                    self.refused.add(tier)
                    slots.clear()
                    warnings.warn(f"tier {tier!r} is trained one device at a time: {reason}", stacklevel=2)
            if short:  # Here the error is gone, and what was begun can be freed.
                self.halve_slots(wanted)

    def halve_slots(self, wanted: int = 0) -> None:
        """Half as many slots for every tier as the largest has, or was to have; less than one each cannot be.

        All are given up and made again when they are needed: most of what a slot takes is what its stream's products
        work in, and that can only be given back as a whole, when no graph of ours reads it any longer.
        """
        fewer = max(wanted, *map(len, self.slots.values())) // 2
        if fewer < 1:
            raise UserError(OUT_OF_MEMORY)
        self.max_slots = fewer
        for slots in self.slots.values():
            slots.clear()
        self.free_memory()


def _run_wave(work: Callable[[Wave[S]], Iterator[Update]], wave: Wave[S]) -> tuple[list[Update], bool]:
    """What came back of a wave, and whether the rest is missing for lack of memory."""
    back: list[Update] = []
    try:
        for update in work(wave):
            back.append(update)
    except UserError:
        raise
    except Exception as error:
        return back, is_out_of_memory(error)
    return back, False
