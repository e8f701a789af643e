"""Creates the folders that runs are written to. Nothing is overwritten without --force."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedhen.errors import UserError
from fedhen.fileio.atomic import PART
from fedhen.fileio.locks import LOCK, lock_folder
from fedhen.runs.layout import CONFIG, FLEET, resume_command

FORCE = ", or --force to replace the runs in it"


def create_run_folders(parent: Path, names: Sequence[str], force: bool = False, instead: str = FORCE) -> list[Path]:
    """Creates empty folders below `parent`; the name "" stands for the parent itself.

    Without `force` the parent must be empty or missing. With `force` the runs in the named folders are replaced, and
    nothing else is touched. `instead` ends the error message with a second way out. A refusal changes nothing.
    """
    folders = [parent / name for name in names]
    try:
        if parent.exists() and not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")
        if not force and _holds_something(parent):
            raise UserError(f"{parent} is not empty: choose another --out{instead}")
        for folder in folders:
            if _holds_something(folder) and not (folder / CONFIG).is_file():
                raise UserError(f"{folder} does not hold a run: --force replaces runs only, choose another --out")
        for folder in folders:
            if _holds_something(folder):
                with lock_folder(folder):
                    shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {parent}: {error.strerror}; choose another --out") from None
    return folders


def reopen_run_folders(parent: Path, names: Sequence[str]) -> list[Path]:
    """Returns the named folders below `parent` with the runs in them, and creates those that are missing."""
    folders = [parent / name for name in names]
    for folder in folders:
        if _holds_something(folder) and not (folder / CONFIG).is_file():
            raise UserError(f"{folder} does not hold a run: --resume continues runs only, choose another --out")
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {parent}: {error.strerror}; choose another --out") from None
    return folders


def find_config(folder: Path) -> Path:
    """Returns the path of a run's configuration. Raises UserError if the folder is not a run folder."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}")
    return folder / CONFIG


def refuse_fleet_run(folder: Path) -> None:
    """Raises UserError for a run of a real fleet: only its devices have the data and the state to continue it."""
    if (folder / FLEET).is_file():
        raise UserError(f"{folder} is the run of a fleet: resume it with: {resume_command(folder)}")


def create_fresh_folder(parent: Path, name: str) -> Path:
    """Creates the first folder of name, name-2, name-3, ... that does not exist yet, also if processes compete."""
    for number in range(1, 1_000_000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"cannot write to {parent}: {error.strerror}; choose another --out") from None
    raise UserError(f"{parent}: no free folder name left for {name}")


def _holds_something(folder: Path) -> bool:
    # A process that was killed before its first write leaves only its lock and partial files.
    return folder.is_dir() and any(p.name != LOCK and not p.name.endswith(PART) for p in folder.iterdir())
