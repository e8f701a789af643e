"""Simulated devices of which some answer too late, by the clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedhen.algorithm.rounds import Devices, Sent
from fedhen.algorithm.updates import Failure, Reply
from fedhen.devices.clock import Clock


@dataclass(frozen=True)
class ClockedDevices:
    """The devices of another engine that answer in time.

    The others are not trained: in a fleet a device whose update was not merged returns to the state that it had before.
    """

    devices: Devices
    clock: Clock

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Trains the devices that answer in time. Yields a failure for each of the others."""
        late = self.clock.find_late(round_number, active)
        for device, reason in late.items():
            yield Failure(device, reason, late=True)
        yield from self.devices.train(round_number, sent, [device for device in active if device not in late])
