"""The folder for downloaded data: its place, and errors of one line for what cannot be read or written there."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedhen.errors import DataError

CHUNK = 1 << 20
ELSEWHERE = "choose another folder with --to or FEDHEN_DATA"


def data_root(override: Path | None = None) -> Path:
    """Returns the folder for downloaded data: `override`, or $FEDHEN_DATA, or the platform's folder for caches."""
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
    with explain_write_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder} is not a folder: {ELSEWHERE}")
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Turns errors while a file is read into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turns errors while a folder is written to into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write to {folder}: {error.strerror}; free some space, or {ELSEWHERE}") from None


def open_file(path: Path, keep: int = 0) -> IO[bytes]:
    """Opens a file to write to, after the first `keep` bytes that it already has."""
    with explain_write_errors(path.parent):
        file = path.open("r+b" if keep else "wb")
        file.truncate(keep)
        file.seek(keep)
    return file


def write(file: IO[bytes], content: bytes, folder: Path) -> None:
    """Writes and flushes, so that a full disk shows at once."""
    with explain_write_errors(folder):
        file.write(content)
        file.flush()


def check_disk(folder: Path, needed: int) -> None:
    """Raises a DataError if the disk of a folder has fewer than `needed` bytes left."""
    if (free := shutil.disk_usage(folder).free) < needed:
        room = f"{free / 1e6:.0f} MB left, and {needed / 1e6:.0f} MB are needed"
        raise DataError(f"{folder} has {room}: free some space, or {ELSEWHERE}")


def hasher(kind: str) -> hashlib._Hash:
    """Returns a new checksum of a kind: MD5, SHA-1 or SHA-256."""
    return hashlib.new(kind.replace("-", ""), usedforsecurity=False)


def digest(path: Path, kind: str) -> str:
    """Returns the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hasher(kind)).hexdigest()
