"""Reads from fleet.json which devices joined a real fleet after its run began."""

from __future__ import annotations

from pathlib import Path

from fedhen.errors import CheckpointError
from fedhen.fileio import untrusted
from fedhen.runs.layout import FLEET


def read_joined(folder: Path, number: int, rounds: int) -> list[str]:
    """Returns the tiers of the devices with this number and later ones, of those that had joined by a round.

    They follow the devices that the configuration counts. A run that no fleet has played has none.
    """
    try:
        devices = (untrusted.read_json(folder / FLEET) or {"devices": []})["devices"]
        return [
            untrusted.check_text(device["tier"])
            for device in devices[number:]
            if untrusted.check_int(device.get("joined", 1), 1) <= max(rounds, 1)
        ]
    except (OSError, *untrusted.PARSE_ERRORS) as error:
        raise CheckpointError(f"{folder / FLEET} is damaged: {untrusted.describe_error(error)}") from None
