"""A node's device between its orders: data and model stay loaded, and random streams come from the order's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedhen.devices.population import Population
from fedhen.devices.state_store import StateStore
from fedhen.engines.sequential import SequentialDevices
from fedhen.fleet.wire_format import Order
from fedhen.seeds import KeyStreams

NO_KEYS: Mapping[int, str] = {}
"""No keys of other rounds."""


@dataclass
class WarmDevice:
    """The device as the last order needed it: its data and its model stay loaded between the rounds of a run."""

    order: Order | None = None
    """What the order says of the run and the device."""
    devices: SequentialDevices | None = None

    def find(self, order: Order) -> SequentialDevices | None:
        """Returns the device if it fits an order. It then remembers nothing of its rounds."""
        if self.devices is None or self.order != keep_what_lasts(order):
            return None
        self.devices.memory = StateStore()
        return self.devices

    def keep(self, order: Order, devices: SequentialDevices) -> None:
        self.order, self.devices = keep_what_lasts(order), devices

    def count_examples(self) -> int:
        return 0 if self.devices is None else len(self.devices.population.data.y)


def keep_what_lasts(order: Order) -> Order:
    """Returns an order without what differs between the rounds of a run."""
    # Any key will do in place of the round's.
    return replace(order, round=1, memory=0, key=order.initial_key, config_text="")


def make_streams(order: Order, more: Mapping[int, str] = NO_KEYS) -> KeyStreams:
    """Returns the random streams that an order has the keys of: those of its round, and of others in `more`."""
    keys = {number: bytes.fromhex(key) for number, key in {order.round: order.key, **more}.items()}
    return KeyStreams(bytes.fromhex(order.initial_key), keys)


def with_keys(population: Population, order: Order, more: Mapping[int, str] = NO_KEYS) -> Population:
    return replace(population, streams=make_streams(order, more))
