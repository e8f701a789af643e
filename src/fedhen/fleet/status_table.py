"""The status of a fleet as tables, for the terminal and for the live page."""

from __future__ import annotations

import time
from collections.abc import Callable

from fedhen.fleet.status import FleetStatus, NodeStatus
from fedhen.reports.rendering import Group, Table, make_printable


def to_text(status: FleetStatus) -> str:
    """Writes what the terminal shows."""
    lines = [describe_server(status), *([describe_run(status)] if status.run else [])]
    if not status.nodes:
        lines.append("no node is enrolled: see `fedhen fleet add`")
    else:
        rows = [tuple(column for column, _ in COLUMNS), *(make_row(node) for node in status.nodes)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
        kept = choose_columns(status)
        lines += ["", *("  ".join(row[p].ljust(widths[p]) for p in kept).rstrip() for row in rows)]
    problems = [f"{node.name}: {node.problem}" for node in status.nodes if node.problem]
    return make_printable("\n".join([*lines, *([""] if problems else []), *problems]))


def describe_server(status: FleetStatus) -> str:
    if not status.is_up:
        return f"the server does not answer at {status.address}: start it with `fedhen fleet serve`"
    return f"{status.online} of {len(status.nodes)} nodes are online"


def describe_run(status: FleetStatus) -> str:
    played = f"{status.round} of {status.rounds} rounds" if status.rounds else "no round yet"
    return f"{status.run}: {played}; {status.phase}"


def make_row(node: NodeStatus) -> tuple[str, ...]:
    return tuple(show(node) for _, show in COLUMNS)


def show_time(seconds: float | None) -> str:
    """Returns how long ago a moment was."""
    if seconds is None:
        return ""
    ago = max(0.0, time.time() - seconds)
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (129600, 3600, "h")):
        if ago < limit:
            return "now" if name == "s" and ago < 5 else f"{ago / unit:.0f} {name} ago"
    return f"{ago / 86400:.0f} days ago"


def show_number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


COLUMNS: tuple[tuple[str, Callable[[NodeStatus], str]], ...] = (
    ("Node", lambda node: node.name),
    ("Tier", lambda node: node.tier),
    ("State", lambda node: node.state),
    ("Last seen", lambda node: show_time(node.seen)),
    ("Last round", lambda node: show_number(node.last_round)),
    ("Late", lambda node: show_number(node.late or None)),
    ("Failed", lambda node: show_number(node.failed or None)),
    ("Examples", lambda node: show_number(node.examples)),
    ("fedhen", lambda node: node.fedhen),
    ("torch", lambda node: node.torch),
    ("Model", lambda node: node.model),
)


def make_node_table(status: FleetStatus) -> Table:
    """Makes the table of nodes on the page."""
    kept = choose_columns(status)
    rows = tuple(tuple(COLUMNS[place][1](node) for place in kept) for node in status.nodes)
    count = f"{status.online} of {len(status.nodes)} online"
    meaning = "The last round is the last one with the node’s answer."
    return Table("nodes", "Nodes", tuple(COLUMNS[place][0] for place in kept), (Group(count, rows),), meaning)


def choose_columns(status: FleetStatus) -> list[int]:
    """Returns the columns in which there is anything."""
    return [place for place, (_, show) in enumerate(COLUMNS) if any(map(show, status.nodes))]
