"""Divides devices into groups that train at the same time, with as many slots of each tier as memory allows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from fedhen.algorithm.updates import Update
from fedhen.errors import FedhenError
from fedhen.hardware.memory import OUT_OF_MEMORY, is_out_of_memory

MAX_SLOTS = 16
"""The most devices of a tier that train at the same time."""


class CannotCapture(Exception):
    """A tier's step cannot be captured as a CUDA graph."""


class HasTier(Protocol):
    """A slot, as far as this module uses it."""

    @property
    def tier(self) -> str: ...


S = TypeVar("S", bound=HasTier)
Group = Sequence[tuple[int, S]]
"""Devices that train at the same time, each with its slot."""


@dataclass
class SlotGroups(Generic[S]):
    """Assigns devices to slots, which are built when first needed and kept for later rounds."""

    make: Callable[[str, int], S]
    """(tier, index) -> a new slot. Raises an out-of-memory error if it does not fit, or CannotCapture."""
    free_memory: Callable[[], None]
    """Frees the memory of deleted slots."""
    slots: dict[str, list[S]] = field(default_factory=dict)
    max_slots: int = MAX_SLOTS
    """The most slots of a tier that fit into memory, as far as has been found."""
    refused: set[str] = field(default_factory=set)
    """Tiers whose step cannot be captured."""

    def train(
        self, waiting: dict[str, list[int]], work: Callable[[Group[S]], Iterator[Update]]
    ) -> Generator[Update, None, list[int]]:
        """Trains the waiting devices of each tier; the order of the tiers is that of their groups.

        Returns the devices that must train one by one: those of refused tiers, and those without an update when
        another device of their group failed.
        """
        apart: list[int] = []
        while any(waiting.values()):
            group = self.next_group(waiting)
            for tier in [tier for tier in waiting if tier in self.refused]:
                apart += waiting.pop(tier)
            back, short = _run_group(work, group)
            yield from back
            trained = {update.device for update in back}
            left = [(device, slot.tier) for device, slot in group if device not in trained]
            # Drops the references to the slots, so that their memory can be freed.
            del group, back
            if short:
                self.halve_slots()
                for device, tier in reversed(left):
                    waiting[tier].insert(0, device)
            else:
                apart += [device for device, _ in left]
        return apart

    def next_group(self, waiting: dict[str, list[int]]) -> list[tuple[int, S]]:
        """Takes as many waiting devices as there are slots."""
        ready = [tier for tier, devices in waiting.items() if devices]
        for tier in ready:
            self.make_slots(tier, len(waiting[tier]))
        group: list[tuple[int, S]] = []
        for tier in ready:
            pairs = list(zip(waiting[tier], self.slots[tier], strict=False))
            del waiting[tier][: len(pairs)]
            group += pairs
        return group

    def make_slots(self, tier: str, number: int) -> None:
        """Makes slots of a tier, up to `number`, as memory allows."""
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
            if short:  # Outside the handler, where the error no longer holds the partial slot.
                self.halve_slots(wanted)

    def halve_slots(self, wanted: int = 0) -> None:
        """Halves the limit of slots, from the most that a tier has or wanted. Raises a FedhenError below one.

        All slots are deleted, to be built again when needed. Most of a slot's memory is the workspace of its stream's
        products, which can only be freed for all streams together, when no graph reads it.
        """
        fewer = max(wanted, *map(len, self.slots.values())) // 2
        if fewer < 1:
            raise FedhenError(OUT_OF_MEMORY)
        self.max_slots = fewer
        for slots in self.slots.values():
            slots.clear()
        self.free_memory()


def _run_group(work: Callable[[Group[S]], Iterator[Update]], group: Group[S]) -> tuple[list[Update], bool]:
    """Returns the updates of a group, and whether the others are missing because memory ran out."""
    back: list[Update] = []
    try:
        for update in work(group):
            back.append(update)
    except FedhenError:
        raise
    except Exception as error:
        return back, is_out_of_memory(error)
    return back, False
