"""The processes that play a run together: each trains its share of a round's devices, and rank 0 alone speaks.

Here is one process by itself; `runtimes/process_group.py` has several. Nothing is imported for it, so that a command
line that only has to know who speaks stays quick.
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
"""What torchrun says in the environment."""


class RankLost(Exception):
    """Another rank cannot be reached any more."""


@dataclass(frozen=True)
class Ranks:
    """Which process this is, and of how many; alone, every operation gives back what it got."""

    rank: int = 0
    number: int = 1

    def combined(self, average: Average) -> Average:
        """What all ranks have folded into their averages, as one."""
        return average

    def total(self, vector: Tensor) -> Tensor:
        """The sum over the ranks."""
        return vector

    def gather(self, value: T) -> list[T]:
        """Every rank's value, a small one that JSON can say, in the order of the ranks."""
        return [value]

    def first(self, act: Callable[[], T]) -> T:
        """What rank 0 alone does, told to all; its UserError is everybody's."""
        return act()

    def carry(self, source: int, to: int, vector: Tensor) -> Tensor:
        """The vector of rank `source` at rank `to`, which gives one of that size and type; only these two call."""
        return vector

    def say(self, error: str) -> None:
        """Tell an error that stops the run: once, where all ranks have it."""
        if not self.rank:
            print(f"fedhen: {error}", file=sys.stderr)


ALONE = Ranks()
_joined: list[Ranks] = []


def read_launcher() -> Ranks:
    """Who this process is by its environment, before it has met the others."""
    if not all(name in os.environ for name in LAUNCHED):
        return ALONE
    return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def current_ranks() -> Ranks:
    """The ranks that this process has joined, or those that it was launched for."""
    # Looked at once: another thread may ask while the main one leaves.
    joined = _joined[-1:]
    return joined[0] if joined else read_launcher()


def set_current_ranks(ranks: Ranks | None) -> None:
    """Note the ranks that this process has joined; none when it leaves them."""
    _joined.clear()
    _joined.extend([ranks] if ranks is not None else [])
