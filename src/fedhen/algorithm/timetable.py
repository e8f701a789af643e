"""What samplers know of the devices' time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Timetable:
    """How long devices take, and which of them can be asked."""

    seconds: Sequence[float]
    """What each device's round takes on average."""
    examples: Sequence[int]
    """The number of training examples of each device."""
    there: Callable[[int], Collection[int]]
    """Round -> the devices that can be asked."""
    deadline: float = math.inf
    """Seconds after which a round ends."""

    def without(self, devices: Collection[int]) -> Timetable:
        """Returns the timetable in which these devices can never be asked."""
        return replace(self, there=lambda number: {*self.there(number)} - {*devices}) if devices else self
