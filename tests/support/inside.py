"""A Flower Grid inside one process: real apps and records, with every message converted to bytes and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedhen.fleet.app import App, recipe_app
from fedhen.fleet.apps import client_app
from fedhen.fleet.wire_format import Order, read_order


def transmit(message: Message) -> Message:
    """Returns the message as it arrives: converted to bytes and back."""
    message.metadata.__dict__["_message_id"] = message.object_id
    contents = {number: part.deflate() for number, part in get_all_nested_objects(message).items()}
    arrived = cast(Message, inflate_object_from_contents(message.object_id, contents))
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


@dataclass
class InsideNode:
    """A node: its settings and its app."""

    config: dict[str, Any]
    app: ClientApp
    silent: Callable[[str], bool] = lambda group: False
    """Round -> whether the node does not answer."""


@dataclass
class InsideGrid(Grid):
    """A grid of these nodes, by their ids. They train when a message is pushed."""

    nodes: dict[int, InsideNode]
    replies: dict[str, Message] = field(default_factory=dict)
    log: list[tuple[str, int]] = field(default_factory=list)
    orders: dict[int, list[Order]] = field(default_factory=lambda: defaultdict(list))
    """Node -> the orders that it was sent."""

    def __post_init__(self) -> None:
        # Flower creates messages only in a process with a task identity.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            arrived = transmit(message)
            numbers.append(arrived.metadata.message_id)
            node_id, group = arrived.metadata.dst_node_id, arrived.metadata.group_id
            self.log.append((arrived.metadata.message_type, node_id))
            if arrived.metadata.message_type == MessageType.TRAIN:
                self.orders[node_id].append(read_order(arrived.content))
            node = self.nodes[node_id]
            if not node.silent(group):
                context = Context(1, node_id, dict(node.config), RecordDict(), {})
                self.replies[numbers[-1]] = transmit(node.app(arrived, context))
        return numbers

    def config_texts(self) -> list[int]:
        """Returns the node of every order that carried the text of the configuration."""
        return [node for node, orders in self.orders.items() for order in orders if order.config_text]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(number) for number in message_ids if number in self.replies]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node) for node in self.nodes]

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **more: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def grid(tiers: Sequence[str], state: Path, app: App | None = None) -> InsideGrid:
    """Builds a grid with a node for each of these tiers, from device 0 on. The ids are in reverse order."""
    client = client_app(app or recipe_app())
    return InsideGrid(
        {
            1000 - 7 * device: InsideNode({"tier": tier, "device": device, "state": str(state / str(device))}, client)
            for device, tier in enumerate(tiers)
        }
    )
