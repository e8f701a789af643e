"""Assigns device numbers to nodes. Each node is asked once for its identity, which is saved with the run."""

from __future__ import annotations

import secrets
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.errors import FleetError, one_line
from fedhen.fileio import untrusted
from fedhen.fileio.atomic import write_json
from fedhen.fleet import wire_format
from fedhen.fleet.exchange import Messages
from fedhen.fleet.wire_format import Identity, Malformed
from fedhen.runs.layout import FLEET

IDENTIFY_TIMEOUT_SECONDS = 120.0
"""A node that has not answered by then is asked again."""
MOST_ASKED = 64
"""Number of nodes that are asked at a time."""
SETTLE_SECONDS = 2.0
"""A fleet that is large enough is complete if no node has joined for this long."""


@dataclass(frozen=True)
class Member:
    """A device of the fleet."""

    identity: Identity
    node: int
    """The last node that this device was."""


@dataclass(frozen=True)
class SavedFleet:
    """The content of fleet.json."""

    run: str
    """A unique name of the run. Devices keep their memories under it."""
    flower_run: int
    """Flower's number of the run that played the folder last; 0 if unknown."""
    members: list[Member]

    def write(self, folder: Path) -> None:
        devices = [{**asdict(member.identity), "node": str(member.node)} for member in self.members]
        write_json(folder / FLEET, {"run": self.run, "flower": str(self.flower_run), "devices": devices})


def read_saved_fleet(folder: Path) -> SavedFleet | None:
    """Reads fleet.json. Returns None if it does not exist. Raises OSError or one of PARSE_ERRORS if it is damaged."""
    values = untrusted.read_json(folder / FLEET)
    if values is None:
        return None
    members = [
        Member(wire_format.read_fields(Identity, entry), int(untrusted.check_text(entry["node"])))
        for entry in values["devices"]
    ]
    flower_run = int(untrusted.check_text(values.get("flower", "0")))
    return SavedFleet(untrusted.check_text(values["run"]), flower_run, members)


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

    def __post_init__(self) -> None:
        self.messages: Messages[int] = Messages(self.grid)
        self.asked_at: dict[int, float] = {}

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
            try:
                if isinstance(content, str):
                    raise Malformed(content)
                self.identities[node] = wire_format.read_identity(content)
                self.readmit(node)
            except Malformed as error:
                # It is asked again after the timeout: it may just have been restarted.
                warnings.warn(f"node {node} has not identified itself: {error}", stacklevel=2)

    def readmit(self, node: int) -> None:
        """Gives a node that comes back its old device number: by its id, or by its name if the old node is gone."""
        identity = self.identities[node]
        if any(member.node == node for member in self.members):
            return
        for device, member in enumerate(self.members):
            same = (member.identity.name, member.identity.tier) == (identity.name, identity.tier)
            if same and member.node not in self.online:
                self.members[device] = replace(member, node=node)
                return
        if self.members:
            warnings.warn(f"node {node} came after the fleet was complete: it waits for the next run", stacklevel=2)

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
        while True:
            self.update()
            known = [self.identities[node].tier for node in self.online & self.identities.keys()]
            unknown_tiers = sorted({tier for tier in known if tiers and tier not in tiers})
            found = len(self.connected_devices()) if self.members else sum(tier not in unknown_tiers for tier in known)
            if found != count:
                count, changed_at = found, time.monotonic()
            waiting = self.online - self.identities.keys()
            if found >= number and (not waiting or time.monotonic() - changed_at > SETTLE_SECONDS):
                return
            if time.monotonic() > end:
                names = ", ".join(unknown_tiers)
                others = f" (others are of tier {names}, which the run does not have)" if names else ""
                raise FleetError(
                    f"{found} of {number} devices have connected after {seconds:g} s{others}: start the others, "
                    "raise fleet.wait_seconds or lower devices.number"
                )
            time.sleep(0.5)

    def number_devices(self, tiers: Sequence[str]) -> None:
        """Gives every connected node a device number: by tier, then by the place that it asks for, then by name."""
        known = {node: identity for node, identity in self.identities.items() if node in self.online}
        for node in [node for node, identity in known.items() if identity.tier not in tiers]:
            warnings.warn(
                f"node {node} is of tier {known.pop(node).tier!r} and is left out: the run has {', '.join(tiers)}",
                stacklevel=2,
            )
        counts = Counter(identity.name for identity in known.values())
        for node in [node for node, identity in known.items() if counts[identity.name] > 1]:
            # With the same name, two nodes that come back could not be told apart.
            known[node] = replace(known[node], name=f"{known[node].name}-{node}")
        order = sorted(known, key=lambda n: (tiers.index(known[n].tier), known[n].place, known[n].name, n))
        self.members = [Member(known[node], node) for node in order]

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


def read_membership(folder: Path, grid: Grid, config: Config) -> Membership:
    """Reads the fleet of a run that has begun."""
    try:
        saved = read_saved_fleet(folder)
    except (OSError, *untrusted.PARSE_ERRORS) as error:
        raise FleetError(f"{folder / FLEET} is damaged: {one_line(untrusted.describe_error(error))}") from None
    if saved is None:
        raise FleetError(f"{folder} was not played by a fleet; resume it with: fedhen resume {folder}")
    if len(saved.members) != config.devices.number:
        raise FleetError(f"{folder / FLEET} has {len(saved.members)} devices, but the run has {config.devices.number}")
    return Membership(grid, toml.to_toml(config), saved.members, saved.run)


def read_flower_run(folder: Path) -> str:
    """Returns Flower's number of the run that played a folder last. Returns "" if it is unknown."""
    try:
        saved = read_saved_fleet(folder)
    except (OSError, *untrusted.PARSE_ERRORS):
        return ""
    return str(saved.flower_run) if saved is not None and saved.flower_run else ""


def sample_counts(members: Iterable[Member]) -> list[int]:
    return [member.identity.samples for member in members]
