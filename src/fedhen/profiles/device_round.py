"""What one device spends in one round: seconds and joules of its downloads, its training and its uploads."""

from __future__ import annotations

from dataclasses import dataclass

from fedhen.profiles.profile import DeviceClass
from fedhen.profiles.quantity import Bound


@dataclass(frozen=True)
class Parts:
    """Seconds or joules of a device-round."""

    down: float = 0.0
    training: float = 0.0
    up: float = 0.0

    @property
    def total(self) -> float:
        return self.down + self.training + self.up

    @property
    def radio(self) -> float:
        return self.down + self.up

    def plus(self, other: Parts) -> Parts:
        """Returns the sums of both."""
        return Parts(self.down + other.down, self.training + other.training, self.up + other.up)


@dataclass(frozen=True)
class DeviceRound:
    """What a device does in a round."""

    operations: float
    """Of its training: those of one example, times the examples that it visits in all epochs."""
    down: float
    """Bytes from the server."""
    up: float
    """Bytes to the server."""

    def seconds(self, of: DeviceClass, jitter: float = 1.0, bound: Bound = "typical") -> Parts:
        """Returns the seconds that it takes a device of a class: one part after the other.

        With the bound "low" the device and its links are as fast as the sources allow, with "high" as slow.
        """
        fast: Bound = {"low": "high", "typical": "typical", "high": "low"}[bound]  # type: ignore[assignment]
        return Parts(
            self.down / of.down.at(fast) * jitter,
            self.operations / of.speed.at(fast) * jitter,
            self.up / of.up.at(fast) * jitter,
        )

    def joules(self, of: DeviceClass, bound: Bound = "typical") -> Parts:
        """Returns the joules that it costs a device of a class. Waiting is not among them."""
        return Parts(
            self.down * of.down_joules.at(bound),
            self.operations * of.joules.at(bound),
            self.up * of.up_joules.at(bound),
        )


def count_visits(
    examples: int,
    *,
    epochs: int,
    batch_size: int,
    max_steps: int = 0,
    drop_last: bool = False,
    together: int = 1,
) -> int:
    """Returns how many examples a device with this number of them trains on in a round, counted in every epoch.

    A step takes `together` batches, of which there are `max_steps` at most, if it is not 0.
    """
    whole, rest = divmod(examples, batch_size)
    per_epoch = examples - rest if drop_last and whole else examples
    if together > 1:
        sizes = [min(batch_size, per_epoch - begin) for begin in range(0, per_epoch, batch_size)] * epochs
        sizes = sizes[:max_steps] if max_steps else sizes
        if len(sizes) < together:
            # A first step without enough batches takes some twice.
            return sum(sizes[place % len(sizes)] for place in range(together)) if sizes else 0
        return sum(sizes[: len(sizes) - len(sizes) % together])
    steps = -(-per_epoch // batch_size)
    if not max_steps or max_steps >= steps * epochs:
        return per_epoch * epochs
    full, left = divmod(max_steps, steps)
    return full * per_epoch + min(per_epoch, left * batch_size)
