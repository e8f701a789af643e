"""`fedhen fleet node`: one process that keeps torch, the app and the model loaded, and works for run after run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from fedhen.errors import FedhenError, one_line
from fedhen.fleet.app import NodeConfig
from fedhen.fleet.apps import EXAMPLES
from fedhen.fleet.node_app import AppLoader
from fedhen.fleet.node_connection import Closed, NodeConnection, Refused, Rejected, RunEnded
from fedhen.fleet.node_file import NodeFile
from fedhen.fleet.node_messages import NodeMessages

SHORTEST_LOOK, LONGEST_LOOK = 0.2, 3.0
"""Seconds between looks for messages: a third of the time since the last message, within these bounds."""
PATIENCE, MOST_PATIENCE = 10.0, 30.0
"""A pause is at least this many times as long as the server took to answer, up to these seconds."""
LONGEST_REASON = 300
CURRENT = "current-message"
"""The file in the state folder that names the message that is being answered."""


@dataclass
class FleetNode:
    """A node: looks for messages, lets the app answer them, and sends the answers."""

    path: Path
    """The node's file."""
    file: NodeFile
    config: NodeConfig
    """What the app's `training_data` is given."""
    state: Path
    log: Callable[[str], None]
    contexts: dict[int, Context] = field(default_factory=dict)
    """Run -> what Flower keeps of it; only of the current run."""
    told: str = ""
    """Why the last message had no result, as it was logged."""

    def __post_init__(self) -> None:
        self.connection = NodeConnection(self.file, self.state, self.log)
        self.messages = NodeMessages(self.connection)
        self.loader = AppLoader(self.path, self.state)

    def run(self) -> None:
        """Runs until a signal ends it. Raises `FleetError` if the server refuses the node."""
        with self.connection.open():
            number = self.connection.node.node_id
            self.log(f"node {self.file.name} (tier {self.file.tier}) is connected to {self.file.address} as {number}")
            self.excuse()
            last = time.monotonic()
            while True:
                looked = time.monotonic()
                try:
                    message = self.messages.pull(self.state / CURRENT)
                    if message is not None:
                        self.handle(message)
                        last = looked = time.monotonic()
                except RunEnded:
                    # Stopped between its message and the answer.
                    pass
                except Rejected as error:
                    self.log(f"the server: {error}")
                time.sleep(choose_pause(time.monotonic() - last, time.monotonic() - looked))

    def excuse(self) -> None:
        """Answers the message that was lost when the node ended, so that the round does not wait for it."""
        lost = self.messages.read_note(self.state / CURRENT)
        if lost is not None and lost.metadata.dst_node_id == self.connection.node.node_id:
            error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the node was restarted before it had answered")
            with suppress(RunEnded, Rejected):
                self.messages.push(Message(error, reply_to=lost), 0.0)
        (self.state / CURRENT).unlink(missing_ok=True)

    def handle(self, message: Message) -> None:
        """Answers a message, and logs a line about it."""
        began, received = time.monotonic(), self.messages.received
        answer, said = self.answer(message)
        self.messages.push(answer, time.monotonic() - began)
        (self.state / CURRENT).unlink(missing_ok=True)
        if said:
            traffic = f"{format_size(received)} received, {format_size(self.messages.sent)} sent"
            self.log(f"{name_message(message)}: {said}, {time.monotonic() - began:.1f} s, {traffic}")

    def answer(self, message: Message) -> tuple[Message, str]:
        """Returns the app's answer, or an error with its reason, and what to log."""
        TaskIdentity.run_id, TaskIdentity.node_id = message.metadata.run_id, self.connection.node.node_id
        TaskIdentity.task_id = message.metadata.dst_task_id or 0
        code, known = ErrorCode.LOAD_CLIENT_APP_EXCEPTION, self.told
        try:
            app, context = self.open_run(message.metadata.run_id)
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            answer = app(message, context)
            self.told = find_failure(answer)
            if not self.told:
                return answer, describe_context(context)
        except (Closed, Refused, RunEnded, Rejected):
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, FedhenError) else f"{type(error).__name__}: {error}"
            self.told = one_line(reason)[:LONGEST_REASON]
            answer = Message(Error(code, self.told), reply_to=message)
        # A node that cannot introduce itself is asked again and again.
        is_known = self.told == known and not message.metadata.group_id
        return answer, "" if is_known else f"failed: {self.told}"

    def open_run(self, run: int) -> tuple[Callable[[Message, Context], Message], Context]:
        """Returns the app of a run and what Flower keeps of it. Nothing of it runs before its code is accepted."""
        if run not in self.contexts:
            app = self.loader.load(self.messages.pull_bundle(run))
            self.contexts = {run: Context(run, self.connection.node.node_id, dict(self.config), RecordDict(), {})}
            return app, self.contexts[run]
        assert self.loader.app is not None
        return self.loader.app, self.contexts[run]


def choose_pause(idle: float, latency: float) -> float:
    """Returns the seconds until the next look: fewer soon after a message, more if the server is slow to answer.

    So hundreds of nodes that have work at once do not keep the server from doing it.
    """
    usual = min(max(idle / 3, SHORTEST_LOOK), LONGEST_LOOK)
    # A little apart, so that the nodes of a fleet do not all look at once.
    return max(usual, min(PATIENCE * latency, MOST_PATIENCE)) * random.uniform(0.9, 1.1)


def find_failure(answer: Message) -> str:
    """Returns why an answer has no result, or "" if it has one."""
    failure = answer.content.get("failure") if answer.has_content() else None
    return one_line(str(failure.get("error")))[:LONGEST_REASON] if isinstance(failure, ConfigRecord) else ""


def describe_context(context: Context) -> str:
    """Returns the number of examples, if the app has trained."""
    known = context.state.get(EXAMPLES)
    return f"{known['count']!r} examples" if isinstance(known, ConfigRecord) else "done"


def name_message(message: Message) -> str:
    round_number = message.metadata.group_id
    return f"round {one_line(round_number)[:20]}" if round_number else "introduction"


def format_size(number: int) -> str:
    return f"{number / 1e6:.2f} MB" if number >= 10_000 else f"{number} bytes"
