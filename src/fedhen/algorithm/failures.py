"""What becomes of a run whose devices fail: it goes on without them, until none comes back any more."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from fedhen.errors import UserError, one_line
from fedhen.hardware.memory import OUT_OF_MEMORY, is_out_of_memory

MAX_EMPTY_ROUNDS = 3
"""So many rounds in a row without any device are no accident."""
NOBODY: Mapping[int, str] = {}
MAX_ERROR_LENGTH = 300
"""Characters of an error that are kept."""


def describe_device_error(error: Exception) -> str:
    """What went wrong on a device, in one line; what is not the device's fault is raised again."""
    if isinstance(error, UserError):
        raise error
    if is_out_of_memory(error):
        raise UserError(OUT_OF_MEMORY) from error
    return one_line(f"{type(error).__name__}: {error}")[:MAX_ERROR_LENGTH]


class FailureWatch:
    """Sees every round: warns the first fault, and ends a run from which no device comes back."""

    def __init__(self, warns: bool = True) -> None:
        self.warns = warns
        self.empty_rounds: list[int] = []
        """The rounds in a row from which no active device came back."""
        self.cause = ""

    def observe(
        self,
        number: int,
        active: Sequence[int],
        returned: Mapping[int, float],
        failed: Mapping[int, str],
        late: Mapping[int, str] = NOBODY,
    ) -> None:
        """What a round did: who was active, who came back, who failed with which error, and who is late."""
        first = next((f"device {device}, round {number}: {error}" for device, error in failed.items()), "")
        if first and self.warns:
            warnings.warn(f"a device failed and is left out, {first}; later ones are only recorded", stacklevel=2)
            self.warns = False
        if returned:
            self.empty_rounds, self.cause = [], ""
        elif active:
            self.empty_rounds.append(number)
            slow = next((f"device {device}, round {number}: {why}" for device, why in late.items()), "")
            self.cause = self.cause or first or slow

    def raise_if_none_returned(self) -> None:
        """Raise the cause if no device came back for too long."""
        if len(self.empty_rounds) < MAX_EMPTY_ROUNDS:
            return
        cause = self.cause or "their weights were not finite, lower training.lr or training.clip"
        raise UserError(f"no device came back from rounds {self.empty_rounds[0]} to {self.empty_rounds[-1]}: {cause}")
