"""A node without a model, for benchmarks: it speaks Flower's node protocol over HTTP, signed, as real nodes do."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from google.protobuf.message import Message as Protobuf

from fedhen.fleet import wire_format
from fedhen.fleet.node import choose_pause
from fedhen.fleet.wire_format import Identity

HEARTBEAT_SECONDS, AWAY_SECONDS = 20.0, 5.0
R = TypeVar("R", bound=Protobuf)


@dataclass
class LightNode:
    """A node without a model."""

    number: int
    tier: str
    key: ec.EllipticCurvePrivateKey
    http: httpx.AsyncClient
    tally: Counter[str]
    answered: set[tuple[int, str]]
    """Round and name of the node of each answer that was sent."""
    node: Node = field(default_factory=Node)
    is_away: bool = False

    def __post_init__(self) -> None:
        self.sender = NodeAuthHttpInterceptor(self.key, self.key.public_key())
        self.random = Random(self.number)

    async def call(self, path: str, request: Protobuf, kind: type[R]) -> R:
        """Sends a signed request, again and again while the server is busy."""
        pause = 1.0
        while True:
            built = self.http.build_request(
                "POST",
                f"/v1/fleet/{path}",
                content=request.SerializeToString(),
                headers={"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE},
            )
            self.sender.intercept(ProtobufRequestContext("", request, built), lambda _: httpx.Response(200))
            self.tally["requests"] += 1
            try:
                response = await self.http.send(built)
                response.raise_for_status()
                answer: R = kind()
                answer.ParseFromString(response.content)
                return answer
            except httpx.HTTPError as error:
                status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
                if status in (401, 403, 412, 413):
                    raise
                self.tally[f"repeated: {status or type(error).__name__}"] += 1
                await asyncio.sleep(pause * self.random.uniform(0.5, 1.0))
                pause = min(2 * pause, 30.0)

    async def connect(self) -> None:
        request = fleet_pb2.ActivateNodeRequest(
            public_key=public_key_to_bytes(self.key.public_key()), heartbeat_interval=30
        )
        self.node.node_id = (await self.call("activate-node", request, fleet_pb2.ActivateNodeResponse)).node_id

    async def beat(self) -> None:
        """Says now and then that the node is there, also while it is busy, as a thread of real nodes does."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS * self.random.uniform(0.8, 1.0))
            if self.is_away:
                continue
            beat = heartbeat_pb2.SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=30)
            await self.call("send-node-heartbeat", beat, heartbeat_pb2.SendNodeHeartbeatResponse)

    async def live(self) -> None:
        """Looks for messages until it is cancelled."""
        await asyncio.sleep(self.random.uniform(0, 10))
        await self.connect()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.beat())
            await self.work()

    async def work(self) -> None:
        """Answers messages."""
        last = time.monotonic()
        while True:
            looked = time.monotonic()
            pull = fleet_pb2.PullMessagesRequest(node=self.node)
            found = await self.call("pull-messages", pull, fleet_pb2.PullMessagesResponse)
            if found.messages_list:
                run = found.messages_list[0].metadata.run_id
                try:
                    await self.answer(await self.receive(run, found.message_object_trees[0]))
                except httpx.HTTPStatusError as error:
                    self.tally[f"given up: {error.response.status_code}"] += 1
                last = looked = time.monotonic()
            await asyncio.sleep(choose_pause(time.monotonic() - last, time.monotonic() - looked))

    async def receive(self, run: int, tree: message_pb2.ObjectTree) -> Message:
        parts = {}
        for part in iterate_object_tree(tree):
            while part.object_id not in parts:
                request = message_pb2.PullObjectRequest(node=self.node, run_id=run, object_id=part.object_id)
                found = await self.call("pull-object", request, message_pb2.PullObjectResponse)
                if found.object_available:
                    parts[part.object_id] = found.object_content
                else:
                    await asyncio.sleep(1)
        confirm = message_pb2.ConfirmMessageReceivedRequest(
            node=self.node, run_id=run, message_object_id=tree.object_id
        )
        await self.call("confirm-message-received", confirm, message_pb2.ConfirmMessageReceivedResponse)
        message = inflate_object_from_contents(tree.object_id, parts)
        assert isinstance(message, Message)
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    async def answer(self, message: Message) -> None:
        """Answers a message, or vanishes for a while."""
        round_number = message.metadata.group_id
        if not round_number:
            who = Identity(self.tier, 100, f"light-{self.number}", self.number)
            await self.push(Message(wire_format.pack_identity(who), reply_to=message))
        elif (int(round_number) + self.number) % 3 == 0:
            self.tally[f"vanished in round {round_number}"] += 1
            gone, self.is_away = fleet_pb2.DeactivateNodeRequest(node_id=self.node.node_id), True
            await self.call("deactivate-node", gone, fleet_pb2.DeactivateNodeResponse)
            await asyncio.sleep(AWAY_SECONDS)
            await self.connect()
            self.is_away = False
            # As a node that was restarted.
            await self.push(Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "it had vanished"), reply_to=message))
        else:
            model = message.content["model"]
            assert isinstance(model, ArrayRecord)
            update = wire_format.pack_answer(wire_format.Answer({}, {}, 1.0, ()))["update"]
            await self.push(Message(RecordDict({"update": update, "model": model}), reply_to=message))
            self.tally[f"answered in round {round_number}"] += 1
            self.answered.add((int(round_number), f"light-{self.number}"))

    async def push(self, answer: Message) -> None:
        answer.metadata.__dict__["_message_id"] = answer.object_id
        request = fleet_pb2.PushMessagesRequest(
            node=self.node,
            messages_list=[message_to_proto(remove_content_from_message(answer))],
            message_object_trees=[get_object_tree(answer)],
            clientapp_runtime_list=[0.0],
        )
        found = await self.call("push-messages", request, fleet_pb2.PushMessagesResponse)
        for number, part in get_all_nested_objects(answer).items():
            if number in found.objects_to_push:
                pushed = message_pb2.PushObjectRequest(
                    node=self.node,
                    run_id=answer.metadata.run_id,
                    object_id=number,
                    object_content=part.deflate(),
                    session_id=found.session_id,
                )
                await self.call("push-object", pushed, message_pb2.PushObjectResponse)
