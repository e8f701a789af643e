"""Devices that fail: a run continues without them, until no device returns any more."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from fedhen.errors import FedhenError, one_line
from fedhen.hardware.memory import OUT_OF_MEMORY, is_out_of_memory

MAX_EMPTY_ROUNDS = 3
"""A run ends after this many rounds in a row from which no device returned."""
MAX_ERROR_LENGTH = 300
"""An error message is cut to this many characters."""


def describe_device_error(error: Exception) -> str:
    """Returns one line that describes a device's error. Raises a FedhenError if the device is not the cause."""
    if isinstance(error, FedhenError):
        raise error
    if is_out_of_memory(error):
        raise FedhenError(OUT_OF_MEMORY) from error
    return one_line(f"{type(error).__name__}: {error}")[:MAX_ERROR_LENGTH]


class FailureWatch:
    """Warns of the first failure of a run, and ends a run from which devices no longer return."""

    def __init__(self, warns: bool = True) -> None:
        self.warns = warns
        self.empty_rounds: list[int] = []
        """The last rounds in a row that had active devices of which none returned."""
        self.cause = ""

    def observe(
        self,
        number: int,
        active: Sequence[int],
        returned: Mapping[int, float],
        failed: Mapping[int, str],
        late: Mapping[int, str],
    ) -> None:
        """Takes note of a round: its active devices, those that returned, and the reasons of those that did not."""
        first = next((f"device {device}, round {number}: {error}" for device, error in failed.items()), "")
        if first and self.warns:
            warnings.warn(f"a device failed and is left out, {first}; later failures are only recorded", stacklevel=2)
            self.warns = False
        if returned:
            self.empty_rounds, self.cause = [], ""
        elif active:
            self.empty_rounds.append(number)
            slow = next((f"device {device}, round {number}: {reason}" for device, reason in late.items()), "")
            self.cause = self.cause or first or slow

    def raise_if_none_returned(self) -> None:
        if len(self.empty_rounds) >= MAX_EMPTY_ROUNDS:
            cause = self.cause or "their weights were not finite, lower training.lr or training.clip"
            first, *_, last = self.empty_rounds
            raise FedhenError(f"no device came back from rounds {first} to {last}: {cause}")
