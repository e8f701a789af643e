"""Devices that do not report the losses of their training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fedhen.algorithm.rounds import Devices, Sent
from fedhen.algorithm.updates import Reply, Update
from fedhen.config.settings import Config


@dataclass(frozen=True)
class SilentDevices:
    """Devices whose losses are not known: under differential privacy an exact loss would tell of their data."""

    devices: Devices

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Trains the active devices and removes their losses."""
        for reply in self.devices.train(round_number, sent, active):
            yield replace(reply, loss=math.nan) if isinstance(reply, Update) else reply


def silence(config: Config, devices: Devices) -> Devices:
    """Returns the devices of a run, which are silent under differential privacy."""
    return SilentDevices(devices) if config.privacy.is_private else devices
