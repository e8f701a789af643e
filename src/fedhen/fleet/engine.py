"""The engine of a real fleet: Flower's nodes train the active devices, and their answers are validated."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from torch import Tensor

from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Failure, Reply, Update
from fedhen.devices.population import Population
from fedhen.fleet import wire_format
from fedhen.fleet.exchange import Messages
from fedhen.fleet.membership import Membership
from fedhen.fleet.need_to_know import describe_run, needs_losses
from fedhen.fleet.wire_format import Answer, Malformed, Order
from fedhen.params import Weights, is_finite

POLL_SECONDS = 0.5
"""Interval between looks for answers. Shorter intervals only keep the SuperLink busy."""
TTL_SLACK_SECONDS = 10.0
"""How long a message may outlive its round."""
RETURN_SECONDS = 5.0
"""If none of the devices that a round waits for is connected, it waits this much longer: one may come back."""


@dataclass
class FleetDevices:
    """The devices of a real fleet."""

    population: Population
    membership: Membership
    read_merged: Callable[[int], dict[int, int]]
    """Round -> device -> the last round before it whose update of the device was merged, from the run's records."""
    poll: float = POLL_SECONDS

    def __post_init__(self) -> None:
        self.config_text = describe_run(self.population.config)
        self.config_digest = wire_format.digest_of(self.config_text)
        self.fixed = {tier: wire_format.pack_weights(w) for tier, w in self.population.fixed.items() if w}
        """Tier -> the weights that no device trains, if there are any. They travel with the configuration."""
        self.has_config: set[int] = set()
        """Nodes that have answered an order of this process, and so were sent the text of the configuration."""
        self.has_fixed: set[int] = set()
        """Nodes that were sent the weights that no device trains."""
        self.lost_at: float | None = None
        """The first look at which none of the devices that are waited for was connected; None if one is."""
        self.merged: dict[int, int] | None = None
        """Device -> the last round whose update was merged. Read from the records only before the first round."""

    def admit(self, population: Population) -> None:
        """Takes the population of the next round, with devices that have joined."""
        self.population = population

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Alg. 1, lines 5-15: sends orders to the active devices, and yields what becomes of each.

        Ends when enough have answered or at the deadline.
        """
        end = time.monotonic() + self.population.config.fleet.deadline_seconds
        if self.merged is None:
            self.merged = self.read_merged(round_number)
            # They were sent them before this server was started, and ask for them if they have lost them.
            self.has_fixed |= {self.membership.members[device].node for device in self.merged}
        messages: Messages[int] = Messages(self.membership.grid)
        self.membership.update()
        there = [device for device in active if self.membership.node_of(device) is not None]
        for device in sorted(set(active) - set(there)):
            yield Failure(device, "it is not connected", late=True)
        yield from self.send_orders(messages, round_number, sent, there)
        needed, asked_again, self.lost_at = self.count_needed(len(active)), set[int](), None
        while messages.waiting and needed > 0:
            for device, content in messages.collect(self.is_connected):
                if wire_format.is_config_request(content) and device not in asked_again:
                    asked_again.add(device)
                    self.has_config.discard(self.membership.members[device].node)
                    self.has_fixed.discard(self.membership.members[device].node)
                    yield from self.send_orders(messages, round_number, sent, [device])
                    continue
                if not isinstance(content, str):
                    self.has_config.add(self.membership.members[device].node)
                    self.has_fixed.add(self.membership.members[device].node)
                reply = self.read_reply(device, content, sent)
                # An update that will be dropped must not end the round for the others.
                if isinstance(reply, Update) and is_finite(reply.weights):
                    needed -= 1
                    self.merged[device] = round_number
                yield reply
                del reply, content
            if not messages.waiting or needed <= 0 or time.monotonic() > end or not self.is_any_connected(messages):
                break
            time.sleep(self.poll)
            self.membership.update()
        # Answers that arrive later are ignored.
        for device in messages.forget():
            if self.is_connected(device):
                ended = "it had not answered when the round ended (fleet.deadline_seconds, fleet.answers)"
                yield Failure(device, ended, late=True)
            else:
                yield Failure(device, "its connection was lost before the server had its answer")

    def send_orders(
        self, messages: Messages[int], round_number: int, sent: Sent, devices: Sequence[int]
    ) -> Iterator[Failure]:
        """Sends each device its order. Yields a failure for each order that the SuperLink does not accept."""
        for device in messages.send(self.make_messages(round_number, sent, devices)):
            yield Failure(device, "the SuperLink does not accept its message")

    def count_needed(self, active: int) -> int:
        """Returns the number of answers that end a round."""
        fleet = self.population.config.fleet
        return min(active, fleet.answers or max(1, active - fleet.spare_devices))

    def is_connected(self, device: int) -> bool:
        return self.membership.members[device].node in self.membership.online

    def is_any_connected(self, messages: Messages[int]) -> bool:
        """Returns whether a device that is waited for is connected, or was a moment ago."""
        now = time.monotonic()
        # From the first look without any: looks may be far apart if the SuperLink is slow.
        self.lost_at = None if any(map(self.is_connected, messages.waiting.values())) else self.lost_at or now
        return self.lost_at is None or now - self.lost_at < RETURN_SECONDS

    def make_messages(self, round_number: int, sent: Sent, devices: Sequence[int]) -> list[tuple[int, Message]]:
        """Builds the orders. The weights of a tier are packed once, and travel to the SuperLink once."""
        config = self.population.config
        tiers = sorted({self.population.tier_of[device] for device in devices})
        wires = self.population.wires
        models = {tier: wire_format.pack_weights(wires[tier].send_down(sent.models[tier])) for tier in tiers}
        means = {tier: self.pack_mean(sent, tier) for tier in tiers}
        found = []
        for device in devices:
            tier, node = self.population.tier_of[device], self.membership.members[device].node
            order, fixed = self.make_order(round_number, device), self.choose_fixed(device)
            content = wire_format.pack_order(order, models[tier], means[tier], fixed)
            ttl = config.fleet.deadline_seconds + TTL_SLACK_SECONDS
            found.append((device, Message(content, node, MessageType.TRAIN, ttl=ttl, group_id=str(round_number))))
        return found

    def make_order(self, round_number: int, device: int) -> Order:
        """Returns what a device must know of a round."""
        population, tier = self.population, self.population.tier_of[device]
        fixed, node = self.fixed.get(tier), self.membership.members[device].node
        return Order(
            run=self.membership.run,
            round=round_number,
            tier=tier,
            memory=(self.merged or {}).get(device, 0) if population.keeps_state else 0,
            inputs=population.data.shape,
            classes=population.outputs,
            config_digest=self.config_digest,
            key=population.run_streams.key_of_device(round_number, device).hex(),
            initial_key=population.run_streams.initial_key.hex(),
            omega=population.omega[device] if population.local.uses_omega else 1.0,
            fixed_digest=wire_format.digest_of(wire_format.content_of(fixed)) if fixed is not None else "",
            config_text="" if node in self.has_config else self.config_text,
        )

    def choose_fixed(self, device: int) -> ArrayRecord | None:
        """Returns the weights that no device trains, if there are any that the device has not been sent."""
        is_known = self.membership.members[device].node in self.has_fixed
        return None if is_known else self.fixed.get(self.population.tier_of[device])

    def pack_mean(self, sent: Sent, tier: str) -> ArrayRecord | None:
        return wire_format.pack_weights(sent.mean[tier]) if self.population.local.copies else None

    def read_reply(self, device: int, content: RecordDict | str, sent: Sent) -> Reply:
        """Reads a device's answer. Returns a failure if it is an error or malformed."""
        if isinstance(content, str):
            return Failure(device, content)
        try:
            return self.read_update(device, content, sent)
        except Malformed as error:
            return Failure(device, str(error))

    def read_update(self, device: int, content: RecordDict, sent: Sent) -> Update:
        """Builds the update of a simulated device from what only the real device can send."""
        population, tier = self.population, self.population.tier_of[device]
        local, model = population.local, sent.models[tier]
        trained = population.select_learned(tier, model)
        changes = trained if local.remember is not None and local.infer_change is None else {}
        wire = population.wires[tier]
        answer = wire_format.read_answer(content, wire.up_like(model), changes, population.outputs)
        if wrong := wire.find_fault(answer.weights, model):
            raise Malformed(wrong)
        answer = replace(answer, weights=wire.receive_up(answer.weights, model))
        if answer.change and is_finite(answer.weights) and not is_finite(answer.change):
            raise Malformed("the change of its memory is not finite")
        return Update(
            device,
            tier,
            answer.weights,
            population.holdings[tier].trained,
            samples=self.membership.members[device].identity.samples,
            loss=answer.loss if needs_losses(population.config) else math.nan,
            rows=self.label_rows(answer),
            memory_change=self.memory_change(answer, trained),
            omega=population.omega[device],
        )

    def memory_change(self, answer: Answer, trained: Weights) -> Weights:
        """Returns the change of the device's memory: sent by the device, or computed here if that is possible."""
        local = self.population.local
        if local.remember is None or not is_finite(answer.weights):
            return {}
        return answer.change if local.infer_change is None else local.infer_change(trained, answer.weights)

    def label_rows(self, answer: Answer) -> dict[str, Tensor]:
        """Returns the output rows of the device's classes. Empty without `server.rows_by_class`."""
        if not self.population.config.server.rows_by_class:
            return {}
        data = self.population.data
        held = torch.zeros(data.classes, dtype=torch.bool, device=data.y.device)
        held[list(answer.present)] = True
        return {name: held for name in answer.weights if name in self.population.family.outputs}
