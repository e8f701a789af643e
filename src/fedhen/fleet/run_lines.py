"""What a run's folder tells its operator in words: who is waited for, who was late, and why a device failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedhen.fileio import untrusted
from fedhen.fleet.board import Board, NodeState
from fedhen.fleet.fleet_file import read_saved_fleet
from fedhen.runs.layout import ERRORS
from fedhen.runs.records import DeviceError, parse_record


def devices_of(run: Path | None) -> dict[str, NodeState]:
    """Returns the devices of a run that was played before there was nodes.json."""
    try:
        saved = read_saved_fleet(run) if run is not None else None
    except (OSError, *untrusted.PARSE_ERRORS):
        saved = None
    members = saved.members if saved is not None else ()
    return {
        str(m.node): NodeState(str(m.node), device, m.identity.name, m.identity.tier, m.identity.samples)
        for device, m in enumerate(members)
    }


def read_errors(run: Path | None) -> Iterator[DeviceError]:
    """Yields the errors of a run's devices, as far as they were recorded."""
    found: list[DeviceError] = []
    if run is not None:
        untrusted.read_json_lines(run / ERRORS, lambda values, line: found.append(parse_record(DeviceError, values)))
    yield from found


def name_devices(run: Path) -> Mapping[int, str]:
    """Returns device -> the name of its node."""
    return {state.device: state.name for state in devices_of(run).values() if state.device is not None}


def tell_round(run: Path, record: Mapping[str, Any]) -> str:
    """Returns a line that names who was late or failed in a round, with the reasons; empty if nobody was."""
    names, number = name_devices(run), record["round"]
    reasons = {error.device: error.error for error in read_errors(run) if error.round == number}
    late = [names.get(device, f"device {device}") for device in record.get("late", ())]
    failed = [
        f"{names.get(device, f'device {device}')} ({reasons.get(device, 'no reason recorded')})"
        for device in record.get("failed", ())
    ]
    parts = [f"{what}: {', '.join(who)}" for what, who in (("late", late), ("failed", failed)) if who]
    return f"round {number}: {'; '.join(parts)}" if parts else ""


def tell_board(board: Board | None) -> list[str]:
    """Returns the lines that a waiting server has for its operator."""
    if board is None or not board.waiting:
        return []
    there = [node.name or node.node for node in board.nodes if node.online and not node.problem and node.tier]
    names = f" ({', '.join(there)})" if there else ""
    return [f"{board.waiting}{names}", *tell_problems(board)]


def tell_problems(board: Board | None) -> list[str]:
    """Returns a line for every node that is connected but cannot take part."""
    nodes = board.nodes if board is not None else ()
    return [f"node {n.name or n.node} cannot take part: {n.problem}" for n in nodes if n.online and n.problem]
