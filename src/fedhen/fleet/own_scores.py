"""The nodes of a fleet score models on their own test data. Only sums and counts come back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from flwr.app import Message, MessageType, RecordDict
from torch import Tensor

from fedhen.data.inputs import call_module
from fedhen.engines.own_models import Asked, OwnSums
from fedhen.engines.sequential import SequentialDevices
from fedhen.fleet import score_messages, wire_format
from fedhen.fleet.engine import TTL_SLACK_SECONDS, FleetDevices
from fedhen.fleet.exchange import Messages
from fedhen.fleet.wire_format import Malformed
from fedhen.runs.layout import LOCAL


@dataclass
class FleetScores:
    """Asks all connected nodes for their scores. A node that does not answer has none."""

    devices: FleetDevices

    def score(self, asked: Asked) -> list[OwnSums]:
        """Returns what each device's test data adds to the metrics, for every owner that is asked for."""
        membership, end = self.devices.membership, time.monotonic() + self.seconds
        membership.update()
        there = [device for device in asked.devices if membership.node_of(device) is not None]
        messages: Messages[int] = Messages(membership.grid)
        found, asked_again = dict[int, dict[str, list[list[float]]]](), set[int]()
        self.send(messages, asked, there)
        self.devices.lost_at = None
        while messages.waiting and time.monotonic() < end and self.devices.is_any_connected(messages):
            for device, content in messages.collect(self.devices.is_connected):
                if wire_format.is_config_request(content) and device not in asked_again:
                    asked_again.add(device)
                    self.devices.has_config.discard(membership.members[device].node)
                    self.devices.has_fixed.discard(membership.members[device].node)
                    self.send(messages, asked, [device])
                    continue
                found[device] = self.read(content, asked.owners)
            if messages.waiting:
                time.sleep(self.devices.poll)
                membership.update()
        messages.forget()
        return [
            OwnSums(owner, device, found.get(device, {}).get(owner, []))
            for owner in asked.owners
            for device in asked.devices
        ]

    @property
    def seconds(self) -> float:
        """How long the server waits for scores."""
        return self.devices.population.config.fleet.deadline_seconds

    def send(self, messages: Messages[int], asked: Asked, devices: Sequence[int]) -> None:
        """Sends each device its order. The weights of a tier are packed once."""
        tier_of, orders = self.devices.population.tier_of, list[tuple[int, Message]]()
        models = {tier: wire_format.pack_weights(weights) for tier, weights in asked.models.items()}
        for device in devices:
            order, fixed = self.devices.make_order(asked.round, device), self.devices.choose_fixed(device)
            start_key = self.find_start_key(asked, device)
            content = score_messages.pack_scoring(order, models[tier_of[device]], asked.owners, start_key)
            if fixed is not None:
                content["fixed"] = fixed
            node = self.devices.membership.members[device].node
            ttl = self.seconds + TTL_SLACK_SECONDS
            orders.append((device, Message(content, node, MessageType.EVALUATE, ttl=ttl, group_id=str(asked.round))))
        messages.send(orders)

    def find_start_key(self, asked: Asked, device: int) -> str:
        """Returns the key of a device's streams before the first round, if a model is trained with them."""
        return self.devices.population.run_streams.key_of_device(0, device).hex() if LOCAL in asked.owners else ""

    def read(self, content: RecordDict | str, owners: Sequence[str]) -> dict[str, list[list[float]]]:
        """Returns a device's sums by owner; empty if it could not score, or its answer is malformed."""
        if isinstance(content, str):
            return {}
        try:
            return score_messages.read_sums(content, owners, self.sums_like)
        except Malformed:
            return {}

    @cached_property
    def sums_like(self) -> list[Tensor]:
        """For each metric, sums of the shape that a device returns."""
        population = self.devices.population
        tier = population.config.tier_of_devices()[0]
        module, (inputs, targets) = SequentialDevices(population).build_module(tier).eval(), population.data.sample()
        with torch.no_grad():
            output = call_module(module, inputs)[-1]
        return [metric.sums(output, targets) for metric in population.task.scores]
