"""nodes.json in a run folder: what the server of a fleet knows of the nodes, for its operator to read at any time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedhen.fileio import untrusted
from fedhen.fileio.atomic import write_json

BOARD = "nodes.json"
SECONDS_BETWEEN_WRITES = 2.0
"""While nothing but the time has changed."""


@dataclass(frozen=True)
class NodeState:
    """A node that has been connected since this server was started, or a device of its run."""

    node: str
    """Flower's number of the node, which JavaScript could not read as a number."""
    device: int | None = None
    name: str = ""
    tier: str = ""
    samples: int | None = None
    fedhen: str = ""
    torch: str = ""
    online: bool = False
    seen: float | None = None
    """When it was connected last, in seconds since 1970; None if this server has not seen it."""
    problem: str = ""
    """Why it cannot take part, although it is connected."""


@dataclass(frozen=True)
class Board:
    """All nodes at a moment."""

    round: int = 0
    """The round that is being played; 0 while the server waits for nodes."""
    found: int = 0
    needed: int = 0
    """How many devices have connected, and how many are waited for."""
    nodes: Sequence[NodeState] = ()
    at: float = field(default=0.0, compare=False)
    """When it was written, in seconds since 1970."""

    @property
    def waiting(self) -> str:
        """What the server waits for; empty during a round."""
        return "" if self.round else f"waiting: {self.found} of {self.needed} nodes"


@dataclass
class BoardWriter:
    """Writes nodes.json when something has changed, and now and then as a sign of life."""

    folder: Path
    last: Board | None = None
    written: float = 0.0

    def show(self, board: Board) -> None:
        now = time.time()
        settled = [replace_seen(node) for node in board.nodes]
        before = [replace_seen(node) for node in self.last.nodes] if self.last else []
        same = self.last is not None and (self.last.round, self.last.found, before) == (
            board.round,
            board.found,
            settled,
        )
        if same and now - self.written < SECONDS_BETWEEN_WRITES:
            return
        self.last, self.written = board, now
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / BOARD, {**asdict(board), "at": now})


def replace_seen(node: NodeState) -> dict[str, Any]:
    """Returns what a node is but for the time, which always changes."""
    return {key: value for key, value in asdict(node).items() if key != "seen"}


def read_board(folder: Path) -> Board | None:
    """Reads nodes.json. Returns None if there is none, or none that can be read."""
    try:
        values = untrusted.read_json(folder / BOARD)
        if values is None:
            return None
        nodes = [_read_node(node) for node in values["nodes"]]
        numbers = {name: untrusted.check_int(values[name]) for name in ("round", "found", "needed")}
        return Board(**numbers, nodes=nodes, at=untrusted.check_number(values["at"]))
    except (OSError, *untrusted.PARSE_ERRORS):
        # It is only shown: a run does not depend on it.
        return None


def _read_node(values: Mapping[str, Any]) -> NodeState:
    texts = ("node", "name", "tier", "fedhen", "torch", "problem")
    known = {name: untrusted.check_text(values[name]) for name in texts}
    device, samples = (
        None if values[name] is None else untrusted.check_int(values[name]) for name in ("device", "samples")
    )
    seen = None if values["seen"] is None else untrusted.check_number(values["seen"])
    return NodeState(**known, device=device, samples=samples, seen=seen, online=values["online"] is True)
