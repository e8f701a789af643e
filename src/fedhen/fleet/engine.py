"""The runtime of a real fleet: a round's devices are Flower's nodes, and only what they may send is taken from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from torch import Tensor

from fedhen import seeds
from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.sampling import Activate
from fedhen.algorithm.updates import Failure, Reply, Update
from fedhen.config import toml
from fedhen.devices.population import Population
from fedhen.fleet import protocol
from fedhen.fleet.membership import Membership
from fedhen.fleet.messages import Messages
from fedhen.fleet.protocol import Answer, Malformed, Order
from fedhen.params import Weights, is_finite

POLL = 0.5
"""Seconds between looks into the mail: more often only keeps the SuperLink busy."""
SLACK = 10.0
"""Seconds for which a message outlives its round."""


@dataclass
class FleetDevices:
    """The devices of a real fleet."""

    fleet: Population
    roster: Membership
    merged: Callable[[int], Mapping[int, int]]
    """Round -> for each device the last round before it of which the server has merged its update."""
    poll: float = POLL

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Alg. 1, lines 5-15: ask the active devices, until enough have answered or the time is up."""
        end = time.monotonic() + self.fleet.config.fleet.deadline_seconds
        mail: Messages[int] = Messages(self.roster.grid)
        self.roster.look()
        there = [device for device in active if self.roster.node_of(device) is not None]
        for device in sorted(set(active) - set(there)):
            yield Failure(device, "it is not connected", late=True)
        for device in mail.send(self.messages(round_number, sent, there)):
            yield Failure(device, "the SuperLink does not take its message")
        needed = self.enough(len(active))
        while mail.waiting and needed > 0:
            for device, content in mail.collect():
                reply = self.reply(device, content, sent)
                # One that will be dropped must not end the round for the others.
                needed -= isinstance(reply, Update) and is_finite(reply.weights)
                yield reply
                del reply, content
            if not mail.waiting or needed <= 0 or time.monotonic() > end or not self.someone(mail):
                break
            time.sleep(self.poll)
            self.roster.look()
        # Their answers, should they still come, are not looked at.
        for device in mail.forget():
            ended = "it had not answered when the round ended (fleet.deadline_seconds, fleet.answers)"
            yield Failure(device, ended, late=True)

    def enough(self, active: int) -> int:
        """How many answers end a round."""
        fleet = self.fleet.config.fleet
        return min(active, fleet.answers or max(1, active - fleet.spare_devices))

    def someone(self, mail: Messages[int]) -> bool:
        """Whether anyone that is waited for is still connected."""
        return any(self.roster.members[device].node in self.roster.online for device in mail.waiting.values())

    def messages(self, round_number: int, sent: Sent, devices: Sequence[int]) -> list[tuple[int, Message]]:
        """What each device is asked; the weights of a tier are packed once, and travel to the SuperLink once."""
        config, merged = self.fleet.config, self.merged(round_number)
        tiers = sorted({self.fleet.tier_of[device] for device in devices})
        models = {tier: protocol.pack(sent.models[tier]) for tier in tiers}
        means = {tier: self.mean(sent, tier) for tier in tiers}
        text, found = toml.to_toml(config), []
        for device in devices:
            tier = self.fleet.tier_of[device]
            order = Order(
                run=self.roster.run,
                round=round_number,
                device=device,
                tier=tier,
                omega=self.fleet.omega[device],
                memory=merged.get(device, 0) if self.fleet.local.remember is not None else 0,
                inputs=self.fleet.data.shape,
                classes=self.fleet.data.classes,
                config=text,
            )
            content = protocol.pack_order(order, models[tier], means[tier])
            node, ttl = self.roster.members[device].node, config.fleet.deadline_seconds + SLACK
            found.append((device, Message(content, node, MessageType.TRAIN, ttl=ttl, group_id=str(round_number))))
        return found

    def mean(self, sent: Sent, tier: str) -> ArrayRecord | None:
        """The mean of the memories, where devices need it."""
        return protocol.pack(sent.mean[tier]) if self.fleet.local.copies else None

    def reply(self, device: int, content: RecordDict | str, sent: Sent) -> Reply:
        """What a device sent as an update, if it is one; else the device has failed."""
        if isinstance(content, str):
            return Failure(device, content)
        try:
            return self.update(device, content, sent)
        except Malformed as error:
            return Failure(device, str(error))

    def update(self, device: int, content: RecordDict, sent: Sent) -> Update:
        """The same as a simulated device gives, from what only the device knows: its weights, loss and memory."""
        fleet, tier = self.fleet, self.fleet.tier_of[device]
        learned, local = fleet.holdings[tier].learned, fleet.local
        model = sent.models[tier]
        trained = {name: tensor for name, tensor in model.items() if name in learned}
        changes = trained if local.remember is not None and local.infer_change is None else {}
        answer = protocol.read_answer(content, model, changes, fleet.data.classes)
        if answer.change and is_finite(answer.weights) and not is_finite(answer.change):
            raise Malformed("what it remembers is not finite")
        return Update(
            device,
            tier,
            answer.weights,
            fleet.holdings[tier].trained,
            samples=self.roster.members[device].identity.samples,
            loss=answer.loss,
            rows=self.rows(answer),
            memory_change=self.remembered(answer, trained),
            omega=fleet.omega[device],
        )

    def remembered(self, answer: Answer, trained: Weights) -> Weights:
        """By how much the device's memory changed: it says so, or the server can tell."""
        local = self.fleet.local
        if local.remember is None or not is_finite(answer.weights):
            return {}
        return answer.change if local.infer_change is None else local.infer_change(trained, answer.weights)

    def rows(self, answer: Answer) -> dict[str, Tensor]:
        """With `server.rows_by_class`, the output rows of the classes that the device holds."""
        if not self.fleet.config.server.rows_by_class:
            return {}
        data = self.fleet.data
        held = torch.zeros(data.classes, dtype=torch.bool, device=data.y.device)
        held[list(answer.present)] = True
        return {name: held for name in answer.weights if name in self.fleet.family.outputs}


def make_fleet_sampler(draw: Activate, roster: Membership, seed: int) -> Activate:
    """Whom to activate in a fleet: those that are drawn, and for each that is not connected another one that is.

    While all are connected it is the draw itself, and so what a simulation does.
    """

    def active(number: int, losses: Mapping[int, float]) -> list[int]:
        roster.look()
        drawn, there = draw(number, losses), set(roster.connected())
        others = [device for device in sorted(there) if device not in drawn]
        shuffled = seeds.stream(seed, "stand-ins", number).permutation(others).tolist()
        return sorted(device if device in there else (shuffled.pop() if shuffled else device) for device in drawn)

    return active
