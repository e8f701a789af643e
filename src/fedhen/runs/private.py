"""What only the server of a private run may see: who took part in its rounds, and what was spent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhen.errors import CheckpointError
from fedhen.fileio.atomic import write_json
from fedhen.fileio.untrusted import PARSE_ERRORS, check_int
from fedhen.runs.layout import PRIVATE, ROUNDS, SPENT
from fedhen.runs.lines import read_whole_lines


def make_private(folder: Path) -> Path:
    """Makes the folder of what only the server may see, which nobody else can enter."""
    return make_closed(folder / PRIVATE)


def make_closed(folder: Path) -> Path:
    """Makes a folder that no other account can enter, if it is not there, and closes it if it is."""
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_spent(folder: Path, streams: Sequence[int]) -> None:
    """Writes how many noisy sums each stream of noise has released. The file is on the disk when this returns."""
    write_json(make_private(folder) / SPENT, {"streams": list(streams)})


def read_spent(folder: Path) -> list[int]:
    """Reads the same; empty if nothing was written."""
    path = folder / PRIVATE / SPENT
    if not path.is_file():
        return []
    try:
        return [check_int(number, 0) for number in json.loads(path.read_text(encoding="utf-8"))["streams"]]
    except (*PARSE_ERRORS, OSError):
        raise CheckpointError(
            f"{path} is damaged, so nobody knows what the run has spent: start another run in another folder"
        ) from None


def read_participation(folder: Path, last: int) -> list[Mapping[str, Any]]:
    """Reads who took part in rounds 1 to `last`: from the server's part of the records, if they have one."""
    private = folder / PRIVATE / ROUNDS
    lines = read_whole_lines(private if private.is_file() else folder / ROUNDS, last)
    return [json.loads(line) for line in lines]
