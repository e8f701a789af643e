"""What only the server of a run may see: its secret, who took part in its rounds, and what they have spent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhen.errors import CheckpointError, ConfigError
from fedhen.fileio.atomic import PART, sync_folder, write_json
from fedhen.fileio.untrusted import PARSE_ERRORS, check_int
from fedhen.runs.layout import LEDGER, PRIVATE, ROUNDS, SECRET
from fedhen.runs.lines import read_whole_lines
from fedhen.seeds import SECRET_BYTES


def make_private(folder: Path) -> Path:
    """Makes the folder of what only the server may see, which nobody else can enter."""
    return make_closed(folder / PRIVATE)


def make_closed(folder: Path) -> Path:
    """Makes a folder that no other account can enter, if it is not there, and closes it if it is."""
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder


def write_secret(folder: Path, secret: bytes) -> None:
    """Writes the secret of a run, unless it is there. It is on the disk when this returns."""
    if read_secret(folder) == secret:
        return
    path = make_private(folder) / SECRET
    part = path.with_name(SECRET + PART)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
        file.write(secret.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def read_secret(folder: Path) -> bytes:
    """Reads the secret of the run in a folder; empty if it has none."""
    path = folder / PRIVATE / SECRET
    return read_secret_file(path) if os.path.lexists(path) else b""


def read_secret_file(path: Path) -> bytes:
    """Reads a file with a secret: 64 hexadecimal digits."""
    try:
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path} cannot be read as a secret of {2 * SECRET_BYTES} hexadecimal digits: restore it")
    return secret


def write_spent(folder: Path, streams: Sequence[int]) -> None:
    """Writes how many noisy sums each stream of noise has released. The file is on the disk when this returns."""
    write_json(make_private(folder) / LEDGER, {"streams": list(streams)})


def read_spent(folder: Path) -> list[int]:
    """Reads the same; empty if nothing was written."""
    path = folder / PRIVATE / LEDGER
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
