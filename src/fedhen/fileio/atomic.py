"""Writes files atomically: after a crash a file is the old one or the new one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PART = ".part"
"""The suffix of a file that is not complete yet."""


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    replace_file(path, text.encode())


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file under another name, syncs it to the disk and renames it."""
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        # On a full disk an incomplete file would only take space.
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes an object as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
