"""Sends messages to nodes over Flower's Grid and collects the answers. No answer of a node can stop the server."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedhen.fleet.replies import Replies

K = TypeVar("K", bound=Hashable)


class Messages(Generic[K]):
    """Messages that have not been answered yet, each with a key that the sender chose."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waiting: dict[str, K] = {}
        """Message id -> its key."""
        self.replies = Replies(grid)

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

    def collect(self, is_there: Callable[[K], bool] = lambda key: True) -> Iterable[tuple[K, RecordDict | str]]:
        """Yields the answers that have arrived since the last call: the content, or the error as text.

        Asks only for those for whose keys `is_there`. If the node of a message is not connected, for example because
        its heartbeat is late, then the SuperLink says so, and deletes the message together with an answer that has
        arrived. Not asked for, the answer is there when the node is back. An answer whose transfer has begun is
        received whether its node is there or not.
        """
        begun = self.replies.arriving
        asked = [number for number, key in self.waiting.items() if number in begun or is_there(key)]
        for number, content in self.replies.pull(asked):
            yield self.waiting.pop(number), content

    def forget(self) -> list[K]:
        """Stops waiting. Returns the keys of the messages without an answer."""
        left = list(self.waiting.values())
        self.waiting.clear()
        self.replies = Replies(self.grid)
        return left
