"""fleet.json in a run folder: the devices of the fleet, in the order of their numbers, and when they came and went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedhen.fileio import untrusted
from fedhen.fileio.atomic import write_json
from fedhen.fleet import wire_format
from fedhen.fleet.wire_format import Identity
from fedhen.runs.layout import FLEET

Away = tuple[tuple[int, int | None], ...]
"""Pairs of rounds: the first without the device, and the first with it again, or None while it is away."""


@dataclass(frozen=True)
class Member:
    """A device of the fleet."""

    identity: Identity
    node: int
    """The last node that this device was."""
    joined: int = 1
    """The first round that it could take part in."""
    away: Away = ()

    @property
    def is_away(self) -> bool:
        """Whether it was not connected when the last round began."""
        return bool(self.away) and self.away[-1][1] is None

    def observe(self, number: int, connected: bool) -> Member:
        """Notes whether the device is connected when a round begins."""
        if connected == (not self.is_away):
            return self
        if not connected:
            return replace(self, away=(*self.away, (number, None)))
        *before, (left, _) = self.away
        # A device that is back before the round in which it was missed has not been away.
        return replace(self, away=(*before, (left, number)) if left < number else tuple(before))

    def return_to(self, played: int) -> Member:
        """Forgets what happened after a round, from which the run resumes. The device keeps its number."""
        kept = [(left, back if back is None or back <= played else None) for left, back in self.away if left <= played]
        return replace(self, joined=min(self.joined, played + 1), away=tuple(kept))


@dataclass(frozen=True)
class SavedFleet:
    """The content of fleet.json."""

    run: str
    """A unique name of the run. Devices keep their memories under it."""
    flower_run: int
    """Flower's number of the run that played the folder last; 0 if unknown."""
    members: Sequence[Member]

    def write(self, folder: Path) -> None:
        devices = [
            {
                **asdict(member.identity),
                "node": str(member.node),
                "joined": member.joined,
                "away": [[left] if back is None else [left, back] for left, back in member.away],
            }
            for member in self.members
        ]
        write_json(folder / FLEET, {"run": self.run, "flower": str(self.flower_run), "devices": devices})


def read_saved_fleet(folder: Path) -> SavedFleet | None:
    """Reads fleet.json. Returns None if it does not exist. Raises OSError or one of PARSE_ERRORS if it is damaged."""
    values = untrusted.read_json(folder / FLEET)
    if values is None:
        return None
    members = [_read_member(entry) for entry in values["devices"]]
    if sorted(members, key=lambda member: member.joined) != members:
        raise ValueError("its devices are not in the order in which they joined")
    flower_run = int(untrusted.check_text(values.get("flower", "0")))
    return SavedFleet(untrusted.check_text(values["run"]), flower_run, members)


def _read_member(entry: Mapping[str, Any]) -> Member:
    return Member(
        wire_format.read_fields(Identity, entry),
        int(untrusted.check_text(entry["node"])),
        # Fleets of earlier versions had all their devices from the first round on.
        untrusted.check_int(entry.get("joined", 1), 1),
        tuple(_read_absence(rounds) for rounds in entry.get("away", ())),
    )


def _read_absence(rounds: Sequence[Any]) -> tuple[int, int | None]:
    left, *back = (untrusted.check_int(number, 1) for number in rounds)
    if len(back) > 1 or any(number <= left for number in back):
        raise ValueError("a device returned before it left")
    return left, back[0] if back else None


def read_flower_run(folder: Path) -> str:
    """Returns Flower's number of the run that played a folder last. Returns "" if it is unknown."""
    try:
        saved = read_saved_fleet(folder)
    except (OSError, *untrusted.PARSE_ERRORS):
        return ""
    return str(saved.flower_run) if saved is not None and saved.flower_run else ""
