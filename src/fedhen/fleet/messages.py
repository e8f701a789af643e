"""Messages to nodes and their answers over Flower's Grid; what a node sends cannot make the server fall."""

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
    """Messages under way, each under a key of the sender's."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waiting: dict[str, K] = {}
        """Message -> its key."""

    def send(self, messages: Sequence[tuple[K, Message]]) -> list[K]:
        """Send them together, so that what they share travels once; the keys of those that could not be sent."""
        if not messages:
            return []
        found = list(self.grid.push_messages([message for _, message in messages]))
        # Flower answers with nothing for a message that it does not take.
        found += [""] * (len(messages) - len(found))
        keys = [key for key, _ in messages]
        self.waiting |= {number: key for number, key in zip(found, keys, strict=True) if number}
        return [key for number, key in zip(found, keys, strict=True) if not number]

    def collect(self) -> Iterable[tuple[K, RecordDict | str]]:
        """What has come back since the last time: an answer, or in words why there is none.

        One by one: a message that Flower itself cannot unpack must not take others with it.
        """
        for number in list(self.waiting):
            try:
                messages = list(self.grid.pull_messages([number]))
                # An expired message is answered by the SuperLink, not by the node: only this tells whose it was.
                found = [read_content(m) for m in messages if m.metadata.reply_to_message_id == number]
            except (OSError, httpx.HTTPError):
                # No node's doing: the SuperLink cannot be reached.
                raise
            except Exception as error:
                found = [f"its message cannot be unpacked: {type(error).__name__}"]
            if found:
                yield self.waiting.pop(number), found[0]

    def forget(self) -> list[K]:
        """Wait no longer; the keys of those that have not come back."""
        left = list(self.waiting.values())
        self.waiting.clear()
        return left


def read_content(message: Message) -> RecordDict | str:
    """What a message holds, or why it holds nothing."""
    if message.has_error():
        reason = message.error.reason or f"error {message.error.code}"
        return one_line(reason)[:MAX_ERROR_LENGTH]
    return message.content
