"""The folder for downloaded data: where it is, and reading and writing there with errors of one line."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedhen.errors import UserError

CHUNK = 1 << 20
ELSEWHERE = "choose another folder with --to or FEDHEN_DATA"


def data_root(override: Path | None = None) -> Path:
    """The folder for downloaded data: as given, or $FEDHEN_DATA, or the platform's place for caches."""
    if override is not None:
        return override
    if named := os.environ.get("FEDHEN_DATA"):
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fedhen"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "fedhen" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedhen"


def make_folder(folder: Path) -> None:
    """Make a folder."""
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is not a folder: {ELSEWHERE}")
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong while reading, in one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What goes wrong while writing, in one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; make room, or {ELSEWHERE}") from None


def open_file(path: Path, keep: int = 0) -> IO[bytes]:
    """A file to write to, after so many of the bytes that it has."""
    with writing(path.parent):
        file = path.open("r+b" if keep else "wb")
        file.truncate(keep)
        file.seek(keep)
    return file


def write(file: IO[bytes], content: bytes, folder: Path) -> None:
    """Write, and know at once if the disk is full."""
    with writing(folder):
        file.write(content)
        file.flush()


def check_room(folder: Path, needed: int) -> None:
    """Refuse to begin what cannot end."""
    if (free := shutil.disk_usage(folder).free) < needed:
        room = f"{free / 1e6:.0f} MB left and {needed / 1e6:.0f} MB are needed"
        raise UserError(f"{folder} has {room}: make room, or {ELSEWHERE}")


def digest(path: Path, kind: str) -> str:
    """A file's checksum."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
