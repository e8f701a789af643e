"""Files that are written whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PART = ".part"
"""The end of the name of a file that is not whole yet."""


def write_text(path: Path, text: str) -> None:
    """Write a text file, so that a reader never sees half of it."""
    replace_file(path, text.encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside, see that it is on the disk, and rename it: after a crash it is the old one or the new."""
    beside = path.with_name(path.name + PART)
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        # On a full disk half a file would only be in the way.
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """See that the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as indented JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
