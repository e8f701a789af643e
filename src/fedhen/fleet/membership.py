"""Assigns device numbers to nodes. Each node is asked once for its identity, which is saved with the run."""

from __future__ import annotations

import secrets
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedhen.config.settings import Config
from fedhen.errors import FleetError, one_line
from fedhen.fileio import untrusted
from fedhen.fleet import wire_format
from fedhen.fleet.board import Board, NodeState
from fedhen.fleet.exchange import Messages
from fedhen.fleet.fleet_file import Member, SavedFleet, read_saved_fleet
from fedhen.fleet.need_to_know import describe_run
from fedhen.fleet.wire_format import Identity, Malformed
from fedhen.runs.layout import FLEET

IDENTIFY_TIMEOUT_SECONDS = 120.0
"""A node that has not answered by then is asked again."""
RETRY_SECONDS = 10.0
"""A node that could not identify itself is asked again after this long."""
MOST_ASKED = 64
"""Number of nodes that are asked at a time."""
SETTLE_SECONDS = 2.0
"""A fleet that is large enough is complete if no node has joined for this long."""


@dataclass
class Membership:
    """The devices of the fleet, in the order of their numbers, and the nodes that they are now."""

    grid: Grid
    config_text: str
    """The configuration, which is part of the question for a node's identity."""
    members: list[Member] = field(default_factory=list)
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    """A unique name of the run. Devices keep their memories under it."""
    identities: dict[int, Identity] = field(default_factory=dict)
    """Node -> its identity, once it has answered."""
    online: frozenset[int] = frozenset()
    """The connected nodes."""
    tell: Callable[[Board], None] = lambda board: None
    """Called with what the operator is to see."""

    def __post_init__(self) -> None:
        self.messages: Messages[int] = Messages(self.grid)
        self.asked_at: dict[int, float] = {}
        self.problems: dict[int, str] = {}
        """Node -> why it cannot take part."""
        self.versions: dict[int, Mapping[str, str]] = {}
        """Node -> the versions that it has reported."""
        self.seen: dict[int, float] = {}
        """Node -> when it was connected last."""
        self.round, self.needed = 0, 0

    def update(self) -> None:
        """Finds the connected nodes, asks new ones for their identity and reads the answers. Does not wait."""
        self.online = frozenset(self.grid.get_node_ids())
        now, timeout = time.monotonic(), IDENTIFY_TIMEOUT_SECONDS
        new = [n for n in self.online - self.identities.keys() if now - self.asked_at.get(n, -timeout) >= timeout]
        # Hundreds of answers at once would be late, and then be asked for again.
        new = new[: max(0, MOST_ASKED - len(self.messages.waiting))]
        self.asked_at |= dict.fromkeys(new, now)
        question = wire_format.pack_question(self.config_text)
        self.messages.send([(node, Message(question, node, MessageType.QUERY, ttl=timeout)) for node in new])
        for node, content in self.messages.collect():
            self.versions[node] = wire_format.read_versions(content)
            try:
                if isinstance(content, str):
                    raise Malformed(content)
                self.identities[node] = wire_format.read_identity(content)
                self.problems.pop(node, None)
            except Malformed as error:
                # It is asked again: it may just have been restarted, or its data may come.
                self.asked_at[node] = now - timeout + RETRY_SECONDS
                self.note_problem(node, str(error), f"node {node} has not identified itself: {error}")
        self.readmit()
        self.seen |= dict.fromkeys(self.online, time.time())
        self.show()

    def show(self) -> None:
        """Tells the operator who is there."""
        devices = {member.node: device for device, member in enumerate(self.members)}
        nodes = [self.describe(node, devices.get(node)) for node in dict.fromkeys([*devices, *sorted(self.seen)])]
        self.tell(Board(self.round, self.count_found(), self.needed, nodes))

    def count_found(self) -> int:
        """Returns how many devices are connected, or before they are numbered, how many nodes could be one."""
        if self.members:
            return len(self.connected_devices())
        return len((self.online & self.identities.keys()) - self.problems.keys())

    def describe(self, node: int, device: int | None = None) -> NodeState:
        """Returns what is known of a node, and of the device that it is."""
        identity = self.members[device].identity if device is not None else self.identities.get(node)
        versions = self.versions.get(node, {})
        return NodeState(
            str(node),
            device,
            identity.name if identity else "",
            identity.tier if identity else "",
            identity.samples if identity else None,
            versions.get("fedhen", ""),
            versions.get("torch", ""),
            node in self.online,
            self.seen.get(node),
            self.problems.get(node, ""),
        )

    def readmit(self) -> None:
        """Gives nodes that come back their old device numbers: by their names, once the old node is gone."""
        for node in self.find_strangers():
            for device, member in enumerate(self.members):
                identity = self.identities[node]
                same = (member.identity.name, member.identity.tier) == (identity.name, identity.tier)
                if same and member.node not in self.online:
                    self.members[device] = replace(member, node=node)
                    break

    def find_strangers(self) -> list[int]:
        """Returns the connected nodes that have identified themselves and are no device yet."""
        known = {member.node for member in self.members}
        return [node for node in self.identities if node in self.online and node not in known]

    def begin_round(self, number: int, tiers: Sequence[str]) -> bool:
        """Takes in who has come since the round before, and notes who has gone. Returns whether anything changed."""
        before = list(self.members)
        self.update()
        names = {member.identity.name for member in self.members}
        new = {node: self.identities[node] for node in self.find_strangers()}
        for node, identity in list(new.items()):
            if identity.tier not in tiers or identity.name in names:
                wrong = explain_tier(identity.tier, tiers)
                if identity.name in names:
                    wrong = f"it is called {identity.name!r} like another node: give it a name and a state of its own"
                self.note_problem(node, wrong, f"node {node} is left out: {wrong}")
                del new[node]
        self.members += [Member(identity, node, number) for node, identity in self.put_in_order(new, tiers)]
        self.members = [
            member.observe(number, self.node_of(device) is not None) for device, member in enumerate(self.members)
        ]
        self.round = number
        self.show()
        return self.members != before

    def return_to(self, played: int) -> None:
        """Forgets who came and went after a round, from which the run resumes."""
        self.members = [member.return_to(played) for member in self.members]

    def members_of(self, number: int) -> list[Member]:
        """Returns the devices of a round, those that were away included."""
        return [member for member in self.members if member.joined <= number]

    def note_problem(self, node: int, problem: str, message: str) -> None:
        """Notes why a connected node cannot take part. The log has it once."""
        if self.problems.get(node) != problem:
            self.problems[node] = problem
            warnings.warn(message, stacklevel=3)

    def node_of(self, device: int) -> int | None:
        """Returns the node of a device. Returns None if it is not connected."""
        node = self.members[device].node
        return node if node in self.online and node in self.identities else None

    def connected_devices(self) -> list[int]:
        return [device for device in range(len(self.members)) if self.node_of(device) is not None]

    def wait_for_nodes(self, number: int, seconds: float, tiers: Sequence[str] = ()) -> None:
        """Waits until `number` nodes of these tiers, or devices of a resumed fleet, have identified themselves.

        Raises `FleetError` if there are fewer after `seconds`.
        """
        end, count, changed_at = time.monotonic() + seconds, 0, time.monotonic()
        self.needed = number
        while True:
            self.update()
            unknown_tiers = set[str]()
            for node in sorted(self.online & self.identities.keys()) if tiers else ():
                if (tier := self.identities[node].tier) not in tiers:
                    unknown_tiers.add(tier)
                    self.problems[node] = explain_tier(tier, tiers)
            found = self.count_found()
            if found != count:
                count, changed_at = found, time.monotonic()
            waiting = self.online - self.identities.keys()
            if found >= number and (not waiting or time.monotonic() - changed_at > SETTLE_SECONDS):
                return
            if time.monotonic() > end:
                names = ", ".join(sorted(unknown_tiers))
                others = f" (others are of tier {names}, which the run does not have)" if names else ""
                why = "".join(
                    f"; node {node}: {self.problems[node]}" for node in sorted(waiting & self.problems.keys())
                )
                raise FleetError(
                    f"{found} of {number} devices have connected after {seconds:g} s{others}: start the others, "
                    f"raise fleet.wait_seconds or lower devices.number{why}"
                )
            time.sleep(0.5)

    def number_devices(self, tiers: Sequence[str]) -> None:
        """Gives every connected node a device number."""
        known = {node: identity for node, identity in self.identities.items() if node in self.online}
        for node in [node for node, identity in known.items() if identity.tier not in tiers]:
            warnings.warn(f"node {node} is left out: {explain_tier(known.pop(node).tier, tiers)}", stacklevel=2)
        counts = Counter(identity.name for identity in known.values())
        for node in [node for node, identity in known.items() if counts[identity.name] > 1]:
            # With the same name, two nodes that come back could not be told apart.
            known[node] = replace(known[node], name=f"{known[node].name}-{node}")
        self.members = [Member(identity, node) for node, identity in self.put_in_order(known, tiers)]

    @staticmethod
    def put_in_order(nodes: Mapping[int, Identity], tiers: Sequence[str]) -> list[tuple[int, Identity]]:
        """Orders nodes that join together: by tier, then by the place that each asks for, then by name."""

        def rank(item: tuple[int, Identity]) -> tuple[int, int, str, int]:
            node, identity = item
            return tiers.index(identity.tier), identity.place, identity.name, node

        return sorted(nodes.items(), key=rank)

    def fit_config(self, config: Config) -> Config:
        """Returns the configuration with the numbers of devices that the fleet has."""
        counts = Counter(member.identity.tier for member in self.members)
        if missing := [tier for tier in config.tiers if not counts[tier]]:
            raise FleetError(f"no node of tier {missing[0]!r} has connected: start one, or remove the tier")
        number = len(self.members)
        active = min(config.devices.active, number)
        shares = {tier: counts[tier] / number for tier in config.tiers}
        return replace(config, devices=replace(config.devices, number=number, active=active, tiers=()), tiers=shares)

    def save(self, folder: Path, flower_run: int) -> None:
        """Saves the fleet in the run folder, with Flower's number of the run."""
        SavedFleet(self.run, flower_run, self.members).write(folder)


def explain_tier(tier: str, tiers: Sequence[str]) -> str:
    return f"it is of tier {tier!r}, which the run does not have: it has {', '.join(tiers)}"


def read_membership(folder: Path, grid: Grid, config: Config, tell: Callable[[Board], None]) -> Membership:
    """Reads the fleet of a run that has begun."""
    try:
        saved = read_saved_fleet(folder)
    except (OSError, *untrusted.PARSE_ERRORS) as error:
        raise FleetError(f"{folder / FLEET} is damaged: {one_line(untrusted.describe_error(error))}") from None
    if saved is None:
        raise FleetError(f"{folder} was not played by a fleet; resume it with: fedhen resume {folder}")
    if (first := sum(member.joined == 1 for member in saved.members)) < config.devices.number:
        raise FleetError(f"{folder / FLEET} has {first} devices, but the run began with {config.devices.number}")
    return Membership(grid, describe_run(config), [*saved.members], saved.run, tell=tell)
