"""How long the server waits for the devices of a round, and for whom."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    """The end of a round."""

    seconds: float
    answered: Sequence[int]
    """The devices whose answers arrived by then, in rising order."""
    waited_for: int | None
    """The device that the server waited for longest; None if it asked nobody."""


@dataclass(frozen=True)
class Waiting:
    """What ends a round, unless all devices have answered before."""

    deadline: float = math.inf
    """Seconds after which it ends in any case."""
    spare: int = 0
    """The number of devices without whose answers it ends. It waits for one answer at least."""

    def end(self, seconds: Mapping[int, float], gone: Collection[int] = ()) -> Ending:
        """Returns the end of a round.

        The server sees that a device has gone, and does not wait for it. If all of them have, the round lasts as long
        as the slowest would have needed.

        Args:
            seconds: The seconds that each device needs, of all that were asked.
            gone: Those of them that drop out.
        """
        if not seconds:
            return Ending(0.0, (), None)
        needed = max(1, len(seconds) - self.spare)
        coming = sorted((own, device) for device, own in seconds.items() if device not in gone)
        answers = [each for each in coming if each[0] <= self.deadline][:needed]
        if answers and len(answers) == min(needed, len(coming)):
            slowest = answers
        else:
            slowest = coming or [(own, device) for device, own in seconds.items()]
        longest, last = max(slowest, key=lambda each: (each[0], -each[1]))
        answered = tuple(sorted(device for _, device in answers))
        return Ending(min(longest, self.deadline), answered, last)
