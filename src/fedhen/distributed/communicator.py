"""The processes that play a run together: each trains its share of a round's devices, and only rank 0 prints.

This module is for a single process, `process_group.py` for several. It does not import torch, so that commands start
quickly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from fedhen.params import Average

T = TypeVar("T")
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets."""


class RankLost(Exception):
    """Another rank can no longer be reached."""


@dataclass(frozen=True)
class Ranks:
    """This process's rank and the number of ranks. With a single rank every operation returns its argument."""

    rank: int = 0
    number: int = 1

    def combine(self, average: Average) -> Average:
        """Returns one average of all that the ranks have added to theirs."""
        return average

    def total(self, vector: Tensor) -> Tensor:
        """Returns the sum over the ranks."""
        return vector

    def gather(self, value: T) -> list[T]:
        """Returns the value of every rank, in order. It must be small and serialisable as JSON."""
        return [value]

    def first(self, act: Callable[[], T]) -> T:
        """Calls `act` on rank 0 only and returns its result on all ranks; a FedhenError is raised on all of them."""
        return act()

    def carry(self, source: int, to: int, vector: Tensor) -> Tensor:
        """Sends a vector from rank `source` to rank `to`, which passes one of that size and type. Only they call it."""
        return vector

    def say(self, error: str) -> None:
        """Prints an error that stops the run, once if all ranks have it."""
        if not self.rank:
            print(f"fedhen: {error}", file=sys.stderr)


ALONE = Ranks()
_joined: list[Ranks] = []


def read_launcher() -> Ranks:
    """Returns the ranks that the environment announces, before they are joined."""
    if not all(name in os.environ for name in LAUNCHED):
        return ALONE
    return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def current_ranks() -> Ranks:
    """Returns the ranks that this process has joined, or those that the environment announces."""
    # Read once: another thread may ask while the main thread leaves.
    joined = _joined[-1:]
    return joined[0] if joined else read_launcher()


def set_current_ranks(ranks: Ranks | None) -> None:
    """Sets the ranks that this process has joined, or None when it leaves them."""
    _joined.clear()
    _joined.extend([ranks] if ranks is not None else [])
