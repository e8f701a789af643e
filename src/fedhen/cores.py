"""Independent pieces of work side by side on the machine's cores, where a piece cannot keep them busy by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedhen import seeds

LARGE = 1e9
"""A forward pass of so many operations keeps several cores busy by itself."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """The work on every item, in their order; each operation of torch uses so many threads.

    What is computed does not depend on the number of cores: they only decide how many items are worked on at a time.
    Two Python threads get less in each other's way than two threads within every small operation.
    """

    def here(item: Item) -> Result:
        # A thread of the pool keeps the number that it began with, unless it is told.
        torch.set_num_threads(threads)
        return work(item)

    with torch_threads(threads):
        return list(pool().map(here, items)) if len(items) > 1 else [work(item) for item in items]


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Inside, operations of torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def pool() -> ThreadPoolExecutor:
    """Kept for all rounds, as torch keeps prepared operations for each thread."""
    return ThreadPoolExecutor(os.cpu_count(), "fedhen")


def operations(module: nn.Module, inputs: Tensor) -> float:
    """Of a forward pass, for one example."""
    counter = FlopCounterMode(display=False)
    with seeds.torch_randomness(0, "counting"), torch.no_grad(), counter:
        list(module(inputs))
    return float(counter.get_total_flops()) / len(inputs)
