"""Which node is which device of the fleet: each is asked once who it is, and what it said is kept with the run."""

from __future__ import annotations

import secrets
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.errors import UserError, one_line
from fedhen.fileio import untrusted
from fedhen.fileio.atomic import write_json
from fedhen.fleet import protocol
from fedhen.fleet.messages import Messages
from fedhen.fleet.protocol import Identity, Malformed
from fedhen.runs.layout import FLEET

IDENTIFY_TIMEOUT_SECONDS = 120.0
"""Seconds that a node has to say who it is; then it is asked again."""
SETTLE_SECONDS = 2.0
"""Seconds without a newcomer after which a fleet that is large enough is complete."""


class Member(NamedTuple):
    """A device of the fleet."""

    identity: Identity
    node: int
    """The node that it last was."""


@dataclass
class Membership:
    """The devices of the fleet in the order of their numbers, and the nodes that they are now."""

    grid: Grid
    config_text: str
    """The configuration that nodes are asked with."""
    members: list[Member] = field(default_factory=list)
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    """A name that no other run has: memories are kept by it."""
    identities: dict[int, Identity] = field(default_factory=dict)
    """Every node that has said who it is."""
    online: frozenset[int] = frozenset()
    """The nodes that are connected."""

    def __post_init__(self) -> None:
        self.messages: Messages[int] = Messages(self.grid)
        self.asked_at: dict[int, float] = {}

    def update(self) -> None:
        """See who is connected, ask newcomers who they are, and hear those that were asked; without waiting."""
        self.online = frozenset(self.grid.get_node_ids())
        now = time.monotonic()
        new = [
            n
            for n in self.online - self.identities.keys()
            if now - self.asked_at.get(n, -IDENTIFY_TIMEOUT_SECONDS) >= IDENTIFY_TIMEOUT_SECONDS
        ]
        self.asked_at |= dict.fromkeys(new, now)
        question = protocol.pack_question(self.config_text)
        self.messages.send(
            [(node, Message(question, node, MessageType.QUERY, ttl=IDENTIFY_TIMEOUT_SECONDS)) for node in new]
        )
        for node, content in self.messages.collect():
            try:
                if isinstance(content, str):
                    raise Malformed(content)
                self.identities[node] = protocol.read_identity(content)
                self.readmit(node)
            except Malformed as error:
                # It is asked again when its time is up: it may just have been restarted.
                warnings.warn(f"node {node} does not say who it is: {error}", stacklevel=2)

    def readmit(self, node: int) -> None:
        """A node that comes back takes its old place: known by its id, else by its name if that node is gone."""
        identity = self.identities[node]
        if any(member.node == node for member in self.members):
            return
        for device, member in enumerate(self.members):
            same = (member.identity.name, member.identity.tier) == (identity.name, identity.tier)
            if same and member.node not in self.online:
                self.members[device] = member._replace(node=node)
                return
        if self.members:
            warnings.warn(f"node {node} came after the fleet was complete: it waits for the next run", stacklevel=2)

    def node_of(self, device: int) -> int | None:
        """The node that is a device now, if it is connected."""
        node = self.members[device].node
        return node if node in self.online and node in self.identities else None

    def connected_devices(self) -> list[int]:
        """The devices that can be asked to train."""
        return [device for device in range(len(self.members)) if self.node_of(device) is not None]

    def wait_for_nodes(self, number: int, seconds: float, tiers: Sequence[str] = ()) -> None:
        """Wait until so many nodes of these tiers have said who they are, or so many devices of a known fleet have."""
        end, here, since = time.monotonic() + seconds, 0, time.monotonic()
        while True:
            self.update()
            known = [self.identities[node].tier for node in self.online & self.identities.keys()]
            strange = sorted({tier for tier in known if tiers and tier not in tiers})
            found = len(self.connected_devices()) if self.members else sum(tier not in strange for tier in known)
            if found != here:
                here, since = found, time.monotonic()
            waiting = self.online - self.identities.keys()
            if found >= number and (not waiting or time.monotonic() - since > SETTLE_SECONDS):
                return
            if time.monotonic() > end:
                others = f" (others are of tier {', '.join(strange)}, which the run does not have)" if strange else ""
                raise UserError(
                    f"{found} of {number} devices have connected after {seconds:g} s{others}: start the others, "
                    "raise fleet.wait or lower devices.number"
                )
            time.sleep(0.5)

    def number_devices(self, tiers: Sequence[str]) -> None:
        """Give every node that is here its device number: by tier, then by the place or the name that it claims."""
        known = {node: who for node, who in self.identities.items() if node in self.online}
        for node in [node for node, who in known.items() if who.tier not in tiers]:
            warnings.warn(
                f"node {node} is of tier {known.pop(node).tier!r}, and is left out: the run has {', '.join(tiers)}",
                stacklevel=2,
            )
        once = Counter(who.name for who in known.values())
        for node in [node for node, who in known.items() if once[who.name] > 1]:
            # Two of one name: when one came back it could not be known which it is.
            known[node] = replace(known[node], name=f"{known[node].name}-{node}")
        order = sorted(known, key=lambda n: (tiers.index(known[n].tier), known[n].place, known[n].name, n))
        self.members = [Member(known[node], node) for node in order]

    def fit_config(self, config: Config) -> Config:
        """The configuration with just as many devices of each tier as there are."""
        counts = Counter(member.identity.tier for member in self.members)
        if missing := [tier for tier in config.tiers if not counts[tier]]:
            raise UserError(f"no node of tier {missing[0]!r} has connected: start one, or leave the tier out")
        number = len(self.members)
        active = min(config.devices.active, number)
        shares = {tier: counts[tier] / number for tier in config.tiers}
        return replace(config, devices=replace(config.devices, number=number, active=active), tiers=shares)

    def save(self, folder: Path, flower_run: int) -> None:
        """Keep it with the run, and Flower's own number of it."""
        members = [{**asdict(member.identity), "node": str(member.node)} for member in self.members]
        write_json(folder / FLEET, {"run": self.run, "flower": str(flower_run), "devices": members})


def read_membership(folder: Path, grid: Grid, config: Config) -> Membership:
    """The fleet of a run that was begun."""
    try:
        found = untrusted.read_json(folder / FLEET)
        if found is None:
            raise UserError(f"{folder} was not played by a fleet: go on with: fedhen resume {folder}")
        members = [_member(entry) for entry in found["devices"]]
        run = untrusted.check_text(found["run"])
    except (OSError, *untrusted.PARSE_ERRORS) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder / FLEET} is damaged: {one_line(untrusted.describe_error(error))}") from None
    if len(members) != config.devices.number:
        raise UserError(f"{folder / FLEET} has {len(members)} devices, the run {config.devices.number}")
    return Membership(grid, toml.to_toml(config), members, run)


def _member(entry: Mapping[str, Any]) -> Member:
    who = Identity(
        tier=untrusted.check_text(entry["tier"]),
        samples=untrusted.check_int(entry["samples"], 1),
        name=untrusted.check_text(entry["name"]),
        place=untrusted.check_int(entry["place"], -1),
    )
    return Member(who, int(untrusted.check_text(entry["node"])))


def read_flower_run(folder: Path) -> str:
    """Flower's number of the run that last played a folder; nothing where it cannot be told."""
    try:
        found = untrusted.read_json(folder / FLEET) or {}
        return str(int(untrusted.check_text(found["flower"])))
    except (OSError, *untrusted.PARSE_ERRORS):
        return ""


def sample_counts(members: Iterable[Member]) -> list[int]:
    """How many examples each device has."""
    return [member.identity.samples for member in members]
