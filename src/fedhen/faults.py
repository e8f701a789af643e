"""What becomes of a run whose devices fail: it goes on without them, until none comes back any more."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from fedhen.errors import UserError, one_line

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE = 3
"""So many rounds in a row without any device are no accident."""
NOBODY: Mapping[int, str] = {}
LONGEST = 300
"""Characters of an error that are kept."""
OUT_OF_MEMORY = (
    "out of memory: lower training.batch_size, devices.active or evaluation.batch_size, or set runtime.rows=host"
)

SAID = ("can't allocate memory", "CUDA error: out of memory", "ALLOC_FAILED")
"""What is said where there is no error of its own for it: by torch on a CPU, by CUDA's graphs, by its libraries."""


def fault_of(error: Exception) -> str:
    """What went wrong on a device, in one line; what is not the device's fault is raised again."""
    if isinstance(error, UserError):
        raise error
    if ran_out(error):
        raise UserError(OUT_OF_MEMORY) from error
    return one_line(f"{type(error).__name__}: {error}")[:LONGEST]


def ran_out(error: BaseException | None) -> bool:
    """Whether it was memory that ran out, in this error or in one that it came of."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(said in str(error) for said in SAID):
            return True
        error = error.__cause__ or error.__context__
    return False


def within_memory(play: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """A generator that says in one line what to lower where memory runs out."""

    @wraps(play)
    def played(*args: P.args, **settings: P.kwargs) -> Iterator[T]:
        try:
            yield from play(*args, **settings)
        except Exception as error:
            if isinstance(error, UserError) or not ran_out(error):
                raise
            raise UserError(OUT_OF_MEMORY) from error

    return played


class Watch:
    """Sees every round: tells the first fault, and ends a run from which no device comes back."""

    def __init__(self, tells: bool = True) -> None:
        self.tells = tells
        self.lost: list[int] = []
        """The rounds in a row from which no active device came back."""
        self.cause = ""

    def see(
        self,
        number: int,
        active: Sequence[int],
        back: Mapping[int, float],
        failed: Mapping[int, str],
        late: Mapping[int, str] = NOBODY,
    ) -> None:
        """What a round did: who was active, who came back, who failed with which error, and who is late."""
        first = next((f"device {device}, round {number}: {error}" for device, error in failed.items()), "")
        if first and self.tells:
            warnings.warn(f"a device failed and is left out, {first}; later ones are only recorded", stacklevel=2)
            self.tells = False
        if back:
            self.lost, self.cause = [], ""
        elif active:
            self.lost.append(number)
            slow = next((f"device {device}, round {number}: {why}" for device, why in late.items()), "")
            self.cause = self.cause or first or slow

    def end_if_in_vain(self) -> None:
        """Raise the cause if no device came back for too long."""
        if len(self.lost) < PATIENCE:
            return
        cause = self.cause or "their weights were not finite, lower training.lr or training.clip"
        raise UserError(f"no device came back from rounds {self.lost[0]} to {self.lost[-1]}: {cause}")
