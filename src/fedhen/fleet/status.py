"""What an operator sees of a fleet: from the SuperLink, the enrolment, the server's notes and the records."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.proto.node_pb2 import NodeInfo

from fedhen.errors import FedhenError, FleetError
from fedhen.fileio import untrusted
from fedhen.fileio.atomic import write_json
from fedhen.fleet.board import Board, NodeState, read_board
from fedhen.fleet.delivery import read_deliveries
from fedhen.fleet.enrolment import EnrolledNode, Enrolment
from fedhen.fleet.project import FleetProject
from fedhen.fleet.registration import REMOVED, open_control
from fedhen.fleet.run_lines import devices_of, read_errors
from fedhen.runs.layout import CONFIG
from fedhen.runs.reader import Run, read_run
from fedhen.version import VERSION

CURRENT = "current.json"
"""The file in a fleet's folder that names its newest run."""
SILENT_SECONDS = 20.0
"""After this long without a sign of life, the server's notes are of a run that is not being played."""


@dataclass(frozen=True)
class NodeStatus:
    """A node of the fleet, as the operator sees it."""

    name: str
    node: str = ""
    """Flower's number of it."""
    tier: str = ""
    state: str = "never seen"
    """online, offline, never seen, or removed."""
    device: int | None = None
    examples: int | None = None
    fedhen: str = ""
    torch: str = ""
    seen: float | None = None
    """When it was connected last, in seconds since 1970."""
    last_round: int | None = None
    """The last round with its answer."""
    late: int = 0
    failed: int = 0
    problem: str = ""
    model: str = ""
    """The model that was delivered to it, if any."""


@dataclass(frozen=True)
class FleetStatus:
    """A fleet and its newest run."""

    address: str
    is_up: bool
    nodes: tuple[NodeStatus, ...]
    run: Path | None = None
    flower_run: str = ""
    round: int = 0
    """The last complete round."""
    rounds: int = 0
    phase: str = ""
    """waiting: 2 of 3 nodes; playing; finished; or not running."""
    records: Run | None = field(default=None, compare=False)

    @property
    def online(self) -> int:
        return sum(node.state == "online" for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "is_up": self.is_up,
            "run": str(self.run) if self.run else None,
            "phase": self.phase,
            "round": self.round,
            "rounds": self.rounds,
            "nodes": [vars(node) for node in self.nodes],
        }


def note_run(project: FleetProject, run: Path, number: str) -> None:
    """Notes which run is the newest, for `status` and `stop`."""
    write_json(project.path / CURRENT, {"run": str(run.resolve()), "flower": number})


def read_current(folder: Path) -> tuple[Path, str] | None:
    """Returns the newest run of a fleet and Flower's number of it. Returns None if there is none."""
    try:
        values = untrusted.read_json(folder / CURRENT)
        if values is None:
            return None
        return Path(untrusted.check_text(values["run"])), untrusted.check_text(values["flower"])
    except (OSError, *untrusted.PARSE_ERRORS):
        raise FleetError(f"{folder / CURRENT} is damaged: remove it, and name the run with --run RUN") from None


def find_status(project: FleetProject, run: Path | None = None) -> FleetStatus:
    """Finds who is connected, and what has become of the newest run or of the given one."""
    current = read_current(project.path)
    if run is None and current is not None:
        run, number = current
    else:
        number = current[1] if current is not None and run is not None and current[0] == run.resolve() else ""
    known = list_nodes(project)
    board = read_board(run) if run is not None else None
    records = read_records(run)
    nodes = merge_nodes(project, known or [], board, run)
    if records is not None:
        nodes = [add_records(node, records, run) for node in nodes]
    deliveries = read_deliveries(project.path)
    nodes = [replace(node, model=deliveries.get(node.node, "")) for node in nodes]
    played = len(records.rounds) if records is not None else 0
    planned = records.length if records is not None else 0
    phase = describe_phase(board, records)
    return FleetStatus(project.address, known is not None, tuple(nodes), run, number, played, planned, phase, records)


def describe_phase(board: Board | None, records: Run | None) -> str:
    if records is not None and records.summary is not None and len(records.rounds) >= records.length:
        return "finished"
    if board is None:
        return "no server has played it yet" if records is None else "not running"
    if time.time() - board.at > SILENT_SECONDS:
        return "not running"
    return board.waiting or f"round {board.round} is being played"


def list_nodes(project: FleetProject) -> list[NodeInfo] | None:
    """Returns the nodes that the SuperLink knows. Returns None if it does not answer."""
    try:
        with open_control(project) as control:
            return list(control.ListNodes(ListNodesRequest()).nodes_info)
    except (httpx.HTTPError, OSError, ValueError):
        return None


def count_online(project: FleetProject) -> int:
    return sum(node.status == "online" for node in list_nodes(project) or ())


def merge_nodes(
    project: FleetProject, known: list[NodeInfo], board: Board | None, run: Path | None
) -> list[NodeStatus]:
    """Returns every node once: enrolled, connected, or a device of the run."""
    enrolled = Enrolment(project.path).read()
    names = {node.pem: node.name for node in enrolled.values()}
    is_fresh = board is not None and time.time() - board.at <= SILENT_SECONDS
    states = {node.node: node for node in board.nodes} if board is not None else devices_of(run)
    infos = {str(info.node_id): info for info in known if info.status != REMOVED}
    found = []
    for number in sorted({*states, *infos}):
        state, info = states.get(number, NodeState(number)), infos.get(number)
        name = (names.get(info.public_key) or info.name if info is not None else "") or state.name or number
        if info is None and not state.online and state.device is None:
            continue
        found.append(describe_node(name, enrolled.get(name), state, info, is_fresh))
    there = {node.name for node in found}
    found += [NodeStatus(node.name, tier=node.tier) for node in enrolled.values() if node.name not in there]
    return sorted(found, key=lambda node: (node.device is None, node.device or 0, node.name))


def describe_node(
    name: str, enrolled: EnrolledNode | None, state: NodeState, info: NodeInfo | None, is_fresh: bool
) -> NodeStatus:
    online = info.status == "online" if info is not None else state.online and is_fresh
    never = info is not None and not online and not info.online_until and state.seen is None
    problem = state.problem if online else ""
    if not problem and state.fedhen and state.fedhen != VERSION:
        problem = f"it has fedhen {state.fedhen}, and the server {VERSION}"
    if enrolled is not None and state.tier and enrolled.tier != state.tier:
        problem = problem or f"it was enrolled for tier {enrolled.tier}"
    return NodeStatus(
        name,
        state.node,
        state.tier or (enrolled.tier if enrolled else ""),
        "online" if online else "never seen" if never else "offline",
        state.device,
        state.samples,
        state.fedhen,
        state.torch,
        time.time() if online else state.seen or find_last_seen(info),
        problem=problem,
    )


def find_last_seen(info: NodeInfo | None) -> float | None:
    """Returns when the SuperLink gave a node up, if it has ever been connected."""
    return min(time.time(), info.online_until) if info is not None and info.online_until else None


def read_records(run: Path | None) -> Run | None:
    if run is None or not (run / CONFIG).is_file():
        return None
    try:
        return read_run(run)
    except FedhenError:
        return None


def add_records(node: NodeStatus, records: Run, run: Path | None) -> NodeStatus:
    """Adds what the records say of a device."""
    if (device := node.device) is None:
        return node
    counts, last = Counter[str](), None
    for record in records.rounds:
        if device not in record.active:
            continue
        outcome = "late" if device in record.late else "failed" if device in record.failed else "answered"
        counts[outcome] += 1
        last = record.round if outcome == "answered" else last
    ends = [record.round for record in records.rounds[-1:] if device in record.failed]
    reason = next((e.error for e in read_errors(run) if e.device == device and e.round in ends), "")
    return replace(node, last_round=last, late=counts["late"], failed=counts["failed"], problem=node.problem or reason)


def to_json(status: FleetStatus) -> str:
    return json.dumps(status.to_dict(), indent=2)
