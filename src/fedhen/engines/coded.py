"""Simulated devices whose models and updates are coded on their way, as those of a real fleet are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fedhen.algorithm.rounds import Devices, Sent
from fedhen.algorithm.updates import Failure, Reply
from fedhen.devices.population import Population
from fedhen.params import Weights


@dataclass
class CodedDevices:
    """The devices of another engine, which receive what the wire carries, and whose updates arrive as it carries them.

    In a fleet, the server and the nodes do the same with what they exchange.
    """

    devices: Devices
    population: Population

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Trains the devices on what they receive, and decodes what they send against the server's own models."""
        received = replace(sent, models={tier: self.receive(tier, model) for tier, model in sent.models.items()})
        for reply in self.devices.train(round_number, received, active):
            if isinstance(reply, Failure):
                yield reply
                continue
            wire = self.population.wires[reply.tier]
            yield replace(reply, weights=wire.receive_up(reply.encoded, sent.models[reply.tier]), encoded={})

    def receive(self, tier: str, model: Weights) -> Weights:
        wire = self.population.wires[tier]
        return wire.receive_down(wire.send_down(model), model)
