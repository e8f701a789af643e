"""Sends messages to nodes over Flower's Grid and collects the answers. No answer of a node can stop the server."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedhen.algorithm.failures import MAX_ERROR_LENGTH
from fedhen.errors import one_line

K = TypeVar("K", bound=Hashable)


class Messages(Generic[K]):
    """Messages that have not been answered yet, each with a key that the sender chose."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waiting: dict[str, K] = {}
        """Message id -> its key."""

    def send(self, messages: Sequence[tuple[K, Message]]) -> list[K]:
        """Sends messages together, so that shared records travel once. Returns the keys of those that were refused."""
        if not messages:
            return []
        found = list(self.grid.push_messages([message for _, message in messages]))
        # Flower returns no id for a message that it refuses.
        found += [""] * (len(messages) - len(found))
        keys = [key for key, _ in messages]
        self.waiting |= {number: key for number, key in zip(found, keys, strict=True) if number}
        return [key for number, key in zip(found, keys, strict=True) if not number]

    def collect(self) -> Iterable[tuple[K, RecordDict | str]]:
        """Yields the answers that have arrived since the last call: the content, or the error as text.

        Pulls them one by one, so that an answer that Flower itself cannot unpack does not affect others.
        """
        for number in list(self.waiting):
            try:
                messages = list(self.grid.pull_messages([number]))
                # An expired message is answered by the SuperLink, not by the node: only this id identifies it.
                found = [read_content(m) for m in messages if m.metadata.reply_to_message_id == number]
            except (OSError, httpx.HTTPError):
                # The SuperLink cannot be reached: not an error of the node.
                raise
            except Exception as error:
                found = [f"its message cannot be unpacked: {type(error).__name__}"]
            if found:
                yield self.waiting.pop(number), found[0]

    def forget(self) -> list[K]:
        """Stops waiting. Returns the keys of the messages without an answer."""
        left = list(self.waiting.values())
        self.waiting.clear()
        return left


def read_content(message: Message) -> RecordDict | str:
    """Returns a message's content, or its error as text."""
    if message.has_error():
        reason = message.error.reason or f"error {message.error.code}"
        return one_line(reason)[:MAX_ERROR_LENGTH]
    return message.content
