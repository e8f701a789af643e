"""Which devices train together when memory is short, with a budget in place of the GPU's memory."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping
from itertools import chain
from typing import NamedTuple
from weakref import WeakSet

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhen.algorithm.updates import Update
from fedhen.engines.cuda.slot_groups import MAX_SLOTS, CannotCapture, Group, SlotGroups
from fedhen.errors import FedhenError
from fedhen.hardware.memory import OUT_OF_MEMORY

KEEPS = 4
"""The workspace that stays after a slot is deleted, until all workspaces are freed together."""


class Memory:
    """A memory of fixed size. A slot takes its size and a workspace, and a group may take more."""

    def __init__(self, total: int, sizes: Mapping[str, int], extra: int = 0) -> None:
        self.total, self.sizes, self.extra = total, sizes, extra
        self.living: WeakSet[Slot] = WeakSet()
        self.kept: set[tuple[str, int]] = set()

    @property
    def taken(self) -> int:
        return sum(self.sizes[slot.tier] for slot in self.living) + KEEPS * len(self.kept)

    def want(self, more: int = 0) -> None:
        if self.taken + more > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def free_memory(self) -> None:
        assert not self.living, "a slot is still referenced, so that nothing can be freed"
        self.kept.clear()

    def work(self, group: Group[Slot]) -> Iterator[Update]:
        """Each device takes what its group needs for a moment; the first half returns before memory can run out."""
        assert len({id(slot) for _, slot in group}) == len(group), "two devices in one slot"
        for k, (device, slot) in enumerate(group):
            if 2 * k >= len(group):
                self.want(self.extra * len(group))
            yield update(device, slot.tier)


class Slot:
    def __init__(self, memory: Memory, tier: str, index: int) -> None:
        self.tier = tier
        memory.kept.add((tier, index))
        memory.living.add(self)
        memory.want()


def update(device: int, tier: str) -> Update:
    return Update(device, tier, {}, frozenset(), 1, 0.0)


def trained(training: Generator[Update, None, list[int]]) -> tuple[list[int], list[int]]:
    """The devices that came back, and those that must train apart."""
    back: list[int] = []
    while True:
        try:
            back.append(next(training).device)
        except StopIteration as end:
            return back, end.value


class Case(NamedTuple):
    sizes: dict[str, int]
    devices: dict[str, list[int]]
    total: int
    extra: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = {f"tier {k}": draw(st.integers(1, 30)) for k in range(draw(st.integers(1, 4)))}
    count = iter(range(1000))
    devices = {tier: [next(count) for _ in range(draw(st.integers(1, 40)))] for tier in sizes}
    return Case(sizes, devices, draw(st.integers(1, 800)), draw(st.integers(0, 6)))


@given(case=cases())
@settings(max_examples=300, deadline=None)
def test_every_device_trains_once_if_one_of_each_tier_fits(case: Case) -> None:
    memory = Memory(case.total, case.sizes, case.extra)
    groups = SlotGroups(lambda tier, index: Slot(memory, tier, index), memory.free_memory)
    one_each = sum(case.sizes.values()) + (KEEPS + case.extra) * len(case.sizes)
    for _ in range(3):
        waiting = {tier: list(devices) for tier, devices in case.devices.items()}
        try:
            back, apart = trained(groups.train(waiting, memory.work))
        except FedhenError as error:
            assert str(error) == OUT_OF_MEMORY
            assert one_each > case.total
        else:
            assert not apart
            assert sorted(back) == sorted(chain.from_iterable(case.devices.values()))
            assert max(map(len, groups.slots.values())) <= groups.max_slots


@pytest.mark.parametrize(("fit", "most"), [(40, 16), (16, 16), (15, 8), (8, 8), (7, 4), (2, 2), (1, 1)])
def test_the_number_at_a_time_is_halved_until_it_fits(fit: int, most: int) -> None:
    memory = Memory(fit * (10 + KEEPS), {"only": 10})
    groups = SlotGroups(lambda tier, index: Slot(memory, tier, index), memory.free_memory)
    sizes: list[int] = []

    def work(group: Group[Slot]) -> Iterator[Update]:
        sizes.append(len(group))
        yield from memory.work(group)

    assert len(list(groups.train({"only": list(range(20))}, work))) == 20
    assert groups.max_slots == most <= MAX_SLOTS
    assert sizes == [most] * (20 // most) + [20 % most] * (20 % most > 0)


def test_a_run_that_found_no_memory_can_be_tried_again() -> None:
    memory = Memory(13, {"only": 10})
    groups = SlotGroups(lambda tier, index: Slot(memory, tier, index), memory.free_memory)
    for _ in range(2):
        with pytest.raises(FedhenError, match="out of memory"):
            list(groups.train({"only": [0, 1]}, memory.work))
    memory.total = 14
    assert trained(groups.train({"only": [0, 1]}, memory.work)) == ([0, 1], [])


def test_refused_tiers_and_failed_groups_train_apart() -> None:
    """A tier's later slot may be refused when its first was not; its slots are then held no longer."""
    memory = Memory(1000, {"deep": 1, "odd": 1})

    def make(tier: str, index: int) -> Slot:
        if tier == "odd" and index == 1:
            raise CannotCapture("it is odd")
        return Slot(memory, tier, index)

    def work(group: Group[Slot]) -> Iterator[Update]:
        for device, slot in group:
            if device == 2:
                raise ValueError("its data is broken")
            yield update(device, slot.tier)

    groups = SlotGroups(make, memory.free_memory)
    waiting = {"deep": [0, 1, 2, 3], "odd": [4, 5, 6]}
    with pytest.warns(UserWarning, match="tier 'odd' is trained one device at a time: it is odd"):
        back, apart = trained(groups.train(waiting, work))
    assert back == [0, 1] and sorted(apart) == [2, 3, 4, 5, 6]
    assert groups.refused == {"odd"} and not groups.slots["odd"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained(groups.train({"deep": [7], "odd": [8]}, work)) == ([7], [8])


def test_an_error_that_is_neither_is_raised() -> None:
    def make(tier: str, index: int) -> Slot:
        raise ZeroDivisionError(tier)

    with pytest.raises(ZeroDivisionError):
        list(SlotGroups(make, lambda: None).train({"only": [0]}, lambda group: iter(())))
