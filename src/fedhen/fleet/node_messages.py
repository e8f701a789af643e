"""Messages of a node: pulls an order with its weights, and pushes the answer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import fab_from_proto, message_from_proto, message_to_proto, run_from_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from google.protobuf.message import DecodeError

from fedhen.errors import FleetError
from fedhen.fileio.atomic import replace_file
from fedhen.fleet.node_connection import NodeConnection, Rejected


@dataclass
class NodeMessages:
    """What a node receives and sends."""

    connection: NodeConnection
    received: int = 0
    """Bytes of the last message."""
    sent: int = 0
    """Bytes of the last answer."""

    def pull(self, note: Path) -> Message | None:
        """Returns the next message for this node, or None if there is none.

        Its description is written to `note` before its parts are pulled: the server does not offer it again. Raises
        `Rejected` if it cannot be received as a whole.
        """
        connection, client = self.connection, self.connection.client
        response = connection.call(client.PullMessages, PullMessagesRequest(node=connection.node))
        if not response.messages_list:
            return None
        about, tree = response.messages_list[0], response.message_object_trees[0]
        about.metadata.message_id = tree.object_id
        # Without a writable state folder the node works all the same.
        with suppress(OSError):
            replace_file(note, about.SerializeToString())
        run = about.metadata.run_id
        pull = make_pull_object_fn_protobuf(
            lambda request: connection.call(client.PullObject, request), connection.node, run
        )
        self.received = 0

        def pull_counted(number: str) -> bytes:
            content = pull(number)
            self.received += len(content)
            return content

        def confirm(number: str) -> None:
            request = ConfirmMessageReceivedRequest(node=connection.node, run_id=run, message_object_id=number)
            connection.call(client.ConfirmMessageReceived, request)

        try:
            message = pull_and_inflate_object_from_tree(tree, pull_counted, confirm, return_type=Message)
        except FleetError:
            raise
        except (ObjectPullError, ValueError, KeyError, TypeError) as error:
            raise Rejected(f"a message cannot be received: {type(error).__name__}") from None
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def read_note(self, path: Path) -> Message | None:
        """Returns the message that was written down, if there is one."""
        try:
            return message_from_proto(ProtoMessage.FromString(path.read_bytes()))
        except (OSError, DecodeError, ValueError):
            return None

    def push(self, answer: Message, seconds: float) -> None:
        """Sends an answer. `seconds` is how long the work took, for Flower's own records."""
        connection, client = self.connection, self.connection.client
        answer.metadata.__dict__["_message_id"] = answer.object_id
        with no_object_id_recompute():
            tree, parts = get_object_tree(answer), get_all_nested_objects(answer)
            response = connection.call(
                client.PushMessages,
                PushMessagesRequest(
                    node=connection.node,
                    messages_list=[message_to_proto(remove_content_from_message(answer))],
                    message_object_trees=[tree],
                    clientapp_runtime_list=[seconds],
                ),
            )
            push = make_push_object_fn_protobuf(
                lambda request: connection.call(client.PushObject, request),
                connection.node,
                answer.metadata.run_id,
                response.session_id,
            )
            self.sent = 0

            def push_counted(number: str, content: bytes) -> None:
                push(number, content)
                self.sent += len(content)

            try:
                push_objects(parts, push_counted, object_ids_to_push={*response.objects_to_push})
            except ObjectPushError:
                raise Rejected("its transfer was not finished in time") from None

    def pull_bundle(self, run: int) -> bytes:
        """Returns a run's app as it is shipped."""
        connection, client = self.connection, self.connection.client
        known = connection.call(client.GetRun, GetRunRequest(node=connection.node, run_id=run))
        request = GetFabRequest(node=connection.node, hash_str=run_from_proto(known.run).fab_hash, run_id=run)
        return fab_from_proto(connection.call(client.GetFab, request).fab).content
