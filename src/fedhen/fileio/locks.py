"""Locks run folders."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedhen.errors import FedhenError

LOCK = "run.lock"
"""Locked while a process plays the run. The system unlocks it, however the process ends."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks a run folder. Raises a FedhenError if another process has locked it."""
    try:
        file = (folder / LOCK).open("ab")
    except OSError as error:
        raise FedhenError(f"cannot write to {folder}: {error.strerror}; make it writable, or choose another") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FedhenError(f"{folder} is in use by another process: wait for it to end, or choose another") from None
        yield


def is_locked(folder: Path) -> bool:
    """Returns whether a process has locked a folder. Does not touch the lock, which another one may want meanwhile."""
    try:
        status = (folder / LOCK).stat()
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    return f" {device}:{status.st_ino} " in locks
