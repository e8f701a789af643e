"""The folder of an export: it has its name only when it is complete, and one process at a time writes to it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedhen.deploy.manifest import MANIFEST
from fedhen.errors import FedhenError
from fedhen.fileio.atomic import PART, sync_folder
from fedhen.runs.folders import Words

COMMAND = Words("--out", "--overwrite")
PYTHON = Words("out", "overwrite=True")
OLD = ".old"
"""The suffix of an export while another one takes its place."""


@contextmanager
def writing(out: Path, overwrite: bool, words: Words = COMMAND) -> Iterator[Path]:
    """Gives a new folder under another name, which becomes `out` at the end; after an error nothing is left of it."""
    path = out.resolve()
    if path == Path.cwd() or not path.name:
        raise FedhenError(f"{out} is the folder that you are in, or the root: choose another {words.folder}")
    missing: list[Path] = []
    try:
        missing += [folder for folder in path.parents if not folder.exists()]
        _refuse_taken(out, overwrite, words)
        with _claim(path.with_name(path.name + PART), out) as part:
            yield part
            sync_folder(part)
            _refuse_taken(out, overwrite, words)
            _put(part, path)
    except OSError as error:
        reason = f"{error.strerror or error}; choose another {words.folder}"
        raise FedhenError(f"cannot write to {out}: {reason}") from None
    finally:
        with suppress(OSError):
            for folder in missing:
                folder.rmdir()


def _refuse_taken(out: Path, overwrite: bool, words: Words) -> None:
    if out.exists() and not out.is_dir():
        raise FedhenError(f"{out} is a file: choose another {words.folder}")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise FedhenError(
            f"{out} is not empty: choose another {words.folder}, or {words.overwrite} to replace the export in it"
        )
    if not (out / MANIFEST).is_file():
        raise FedhenError(
            f"{out} does not hold an export: {words.overwrite} replaces exports only, choose another {words.folder}"
        )


@contextmanager
def _claim(part: Path, out: Path) -> Iterator[Path]:
    """Gives an empty folder that only this process writes to; what a killed process left in it is removed."""
    part.mkdir(parents=True, exist_ok=True)
    handle = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # The system unlocks it, however the process ends.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), part.stat()):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):
            raise FedhenError(f"another process exports to {out}: wait for it to end, or choose another") from None
        try:
            _empty(part)
            yield part
        finally:
            # Once it has its name there is nothing to remove.
            shutil.rmtree(part, ignore_errors=True)
    finally:
        os.close(handle)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _put(part: Path, path: Path) -> None:
    """Gives the new folder its name. An export that has it is moved aside whole: none is ever half there."""
    old = path.with_name(path.name + OLD)
    if path.is_dir() and any(path.iterdir()):
        shutil.rmtree(old, ignore_errors=True)
        path.replace(old)
    part.replace(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)
