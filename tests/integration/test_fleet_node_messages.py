"""What a node writes down of a message before anything can go wrong with it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fedhen.fleet.node_connection import Closed, NodeConnection
from fedhen.fleet.node_messages import NodeMessages

pytestmark = pytest.mark.fleet


def test_a_message_is_written_down_before_its_parts_are_pulled(tmp_path: Path) -> None:
    """The server offers a message once: a node that dies meanwhile must know it, or the round waits for its end."""
    # Flower creates messages only in a process with a task identity.
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    order = Message(RecordDict({"order": ConfigRecord({"round": 3})}), 42, MessageType.TRAIN, group_id="3")
    order.metadata.__dict__["_message_id"] = order.object_id
    offered = PullMessagesResponse(
        messages_list=[message_to_proto(remove_content_from_message(order))],
        message_object_trees=[get_object_tree(order)],
    )

    def die(request: Any) -> Any:
        raise Closed

    client = SimpleNamespace(PullMessages=lambda request: offered, PullObject=die)
    connection = SimpleNamespace(
        client=client, node=Node(node_id=42), call=lambda send, request: send(request), state=tmp_path
    )
    messages, note = NodeMessages(cast(NodeConnection, connection)), tmp_path / "note"
    with pytest.raises(Closed):
        messages.pull(note)
    found = messages.read_note(note)
    assert found is not None
    # After a restart it is answered with an error.
    excuse = Message(Error(1, "the node was restarted"), reply_to=found)
    assert excuse.metadata.reply_to_message_id == order.object_id
    assert (excuse.metadata.src_node_id, excuse.metadata.group_id) == (42, "3")
