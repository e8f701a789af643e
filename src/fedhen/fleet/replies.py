"""Pulls answers from the SuperLink: many are asked for in one request, and each is received by itself.

Flower's own `pull_messages` loses all answers of a request if one of them cannot be unpacked, and waits for an answer
whose transfer has only begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx
from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from flwr.superlink.grid.http_grid import HttpGrid

from fedhen.algorithm.failures import MAX_ERROR_LENGTH
from fedhen.errors import one_line

BATCH = 128
"""Number of answers that one request asks for."""


@dataclass
class Arriving:
    """An answer whose transfer has begun."""

    tree: ObjectTree
    parts: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Replies:
    """Answers to the messages of one sender."""

    grid: Grid
    arriving: dict[str, Arriving] = field(default_factory=dict)
    """Id of a message -> its answer, as far as it has arrived."""

    def pull(self, numbers: Sequence[str]) -> Iterator[tuple[str, RecordDict | str]]:
        """Yields the id of every message that is answered by now, with the content or the error as text."""
        if not isinstance(self.grid, HttpGrid):
            yield from self.pull_one_by_one(numbers)
            return
        for start in range(0, len(numbers), BATCH):
            batch = [number for number in numbers[start : start + BATCH] if number not in self.arriving]
            if batch:
                self.ask(self.grid, batch)
        for number in [number for number in numbers if number in self.arriving]:
            found = self.receive(self.grid, self.arriving[number])
            if found is not None:
                del self.arriving[number]
                yield number, found

    def ask(self, grid: HttpGrid, numbers: Sequence[str]) -> None:
        """Notes which of these messages have an answer."""
        response = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=numbers))
        for answer, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            if answer.metadata.reply_to_message_id in numbers:
                self.arriving[answer.metadata.reply_to_message_id] = Arriving(tree)

    def receive(self, grid: HttpGrid, answer: Arriving) -> RecordDict | str | None:
        """Returns an answer, or its error as text. Returns None if not all of it has arrived."""
        client, run = grid._runtime_client, grid.run.run_id
        pull = make_pull_object_fn_protobuf(client.PullObject, grid.node, run)
        try:
            for part in iterate_object_tree(answer.tree):
                if part.object_id not in answer.parts:
                    answer.parts[part.object_id] = pull(part.object_id)
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=grid.node, run_id=run, message_object_id=answer.tree.object_id)
            )
            message = inflate_object_from_contents(answer.tree.object_id, answer.parts)
            return read_content(message) if isinstance(message, Message) else "its answer is not a message"
        except ObjectUnavailableError:
            return None
        except ObjectPullError:
            return "its answer was not sent completely"
        except (OSError, httpx.HTTPError):
            # The SuperLink cannot be reached: not an error of the node.
            raise
        except Exception as error:
            return f"its message cannot be unpacked: {type(error).__name__}"

    def pull_one_by_one(self, numbers: Sequence[str]) -> Iterator[tuple[str, RecordDict | str]]:
        """The same over any other grid, which can only be asked for whole answers."""
        for number in numbers:
            # An expired message is answered by the SuperLink, not by the node: only this id identifies it.
            for message in self.grid.pull_messages([number]):
                if message.metadata.reply_to_message_id == number:
                    yield number, read_content(message)


def read_content(message: Message) -> RecordDict | str:
    """Returns a message's content, or its error as text."""
    if message.has_error():
        reason = message.error.reason or f"error {message.error.code}"
        return one_line(reason)[:MAX_ERROR_LENGTH]
    return message.content
