"""A fleet inside one process on the state of Flower's SuperLink: its own rules for messages and nodes hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from flwr.app import Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkState, LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

from support.inside import InsideNode

HEARTBEAT_SECONDS = 300.0


@dataclass
class InsideSuperLink:
    """Nodes by their names. They look for work each time that the server asks which nodes there are."""

    apps: Mapping[str, InsideNode]
    look: Callable[[InsideSuperLink], None] = lambda inside: None
    """Called after the nodes have worked."""
    answered: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Node -> the groups of the messages that it has answered. That of an order is the number of its round."""

    def __post_init__(self) -> None:
        factory = LinkStateFactory(":flwr-in-memory:", NoOpFederationManager(), ObjectStoreFactory())
        self.state: LinkState = factory.state()
        self.run: int = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        (task,) = self.state.get_tasks()
        self.task: int = task.task_id
        assert self.state.claim_task(self.task) and self.state.activate_task(self.task)
        self.numbers = {
            name: self.state.create_node(NOOP_FLWR_AID, "owner", name.encode(), HEARTBEAT_SECONDS) for name in self.apps
        }
        for name in self.apps:
            self.connect(name)
        # Flower creates messages only in a process with a task identity.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = self.run, 1, 1

    def connect(self, name: str) -> None:
        assert self.state.activate_node(self.numbers[name], HEARTBEAT_SECONDS)

    def disconnect(self, name: str) -> None:
        assert self.state.deactivate_node(self.numbers[name])

    def grid(self) -> HttpGrid:
        """Returns Flower's grid, whose requests are handled here by Flower's handlers instead of sent."""
        task = SimpleNamespace(run_id=self.run)
        names = ("push_messages", "pull_messages", "push_object", "pull_object", "confirm_message_received")
        handlers: dict[str, Any] = {
            "".join(word.capitalize() for word in name.split("_")): partial(
                getattr(runtime_handlers, name), state=self.state, task=task
            )
            for name in names
        }
        grid = HttpGrid(token="none")
        grid._client = cast(Any, SimpleNamespace(**handlers, GetNodes=partial(self._get_nodes, task)))
        (run,) = self.state.get_run_info(run_ids=[self.run])
        grid.set_run(run)
        return grid

    def _get_nodes(self, task: Any, request: Any) -> Any:
        assert self.state.acknowledge_task_heartbeat(self.task)
        for name in self.apps:
            while self.work(name):
                pass
        self.look(self)
        return runtime_handlers.get_nodes(request, self.state, task)

    def work(self, name: str) -> bool:
        """Lets a node answer a message. Returns whether there was one."""
        node, app = Node(node_id=self.numbers[name]), self.apps[name]
        found = fleet_handlers.pull_messages(
            fleet_pb2.PullMessagesRequest(node=node), self.state, self.state.object_store
        )
        if not found.messages_list:
            return False
        tree = found.message_object_trees[0]
        parts = {}
        for part in iterate_object_tree(tree):
            pull = message_pb2.PullObjectRequest(node=node, run_id=self.run, object_id=part.object_id)
            parts[part.object_id] = fleet_handlers.pull_object(pull, self.state).object_content
        order = cast(Message, inflate_object_from_contents(tree.object_id, parts))
        order.metadata.__dict__["_message_id"] = tree.object_id
        self.push(node, app.app(order, Context(self.run, node.node_id, dict(app.config), RecordDict(), {})))
        self.answered[name].append(order.metadata.group_id)
        return True

    def push(self, node: Node, answer: Message) -> None:
        self.describe(node, answer)()

    def describe(self, node: Node, answer: Message) -> Callable[[], None]:
        """Tells the SuperLink of an answer. Returns what sends its parts."""
        answer.metadata.__dict__["_message_id"] = answer.object_id
        request = fleet_pb2.PushMessagesRequest(
            node=node,
            messages_list=[message_to_proto(remove_content_from_message(answer))],
            message_object_trees=[get_object_tree(answer)],
        )
        wanted, parts = fleet_handlers.push_messages(request, self.state), get_all_nested_objects(answer)

        def send_parts() -> None:
            for number in wanted.objects_to_push:
                pushed = message_pb2.PushObjectRequest(
                    node=node,
                    run_id=self.run,
                    object_id=number,
                    object_content=parts[number].deflate(),
                    session_id=wanted.session_id,
                )
                assert fleet_handlers.push_object(pushed, self.state).stored

        return send_parts
