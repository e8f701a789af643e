"""Creates the folders that runs are written to. Nothing is overwritten unless the user asks for it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedhen.errors import CheckpointError, ConfigError, FedhenError
from fedhen.fileio.atomic import PART
from fedhen.fileio.locks import LOCK, lock_folder
from fedhen.runs.layout import CONFIG, FLEET, resume_command

DEPTH = 3
"""Levels below a folder at which runs are looked for."""


class Words(NamedTuple):
    """What error messages call the arguments of the caller's user."""

    folder: str
    overwrite: str = ""
    """Empty if there is no such argument."""


COMMAND = Words("--run-dir", "--overwrite")
PYTHON = Words("run_dir", "overwrite=True")


def create_run_folders(
    parent: Path, names: Sequence[str], overwrite: bool = False, words: Words = COMMAND
) -> list[Path]:
    """Creates empty folders below `parent`; the name "" stands for the parent itself.

    Without `overwrite` the parent must be empty or missing. With it the runs in the named folders are replaced, and
    nothing else is touched. A refusal changes nothing.
    """
    folders = [parent / name for name in names]
    try:
        if parent.exists() and not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")
        if not overwrite and _holds_something(parent):
            instead = f", or {words.overwrite} to replace the runs in it" if words.overwrite else ""
            raise ConfigError(f"{parent} is not empty: choose another {words.folder}{instead}")
        for folder in folders:
            if _holds_something(folder) and not (folder / CONFIG).is_file():
                raise ConfigError(
                    f"{folder} does not hold a run: {words.overwrite} replaces runs only, choose another {words.folder}"
                )
        for folder in folders:
            if _holds_something(folder):
                with lock_folder(folder):
                    shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedhenError(f"cannot write to {parent}: {error.strerror}; choose another {words.folder}") from None
    return folders


def reopen_run_folders(parent: Path, names: Sequence[str]) -> list[Path]:
    """Returns the named folders below `parent` with the runs in them, and creates those that are missing."""
    folders = [parent / name for name in names]
    for folder in folders:
        if _holds_something(folder) and not (folder / CONFIG).is_file():
            raise ConfigError(
                f"{folder} does not hold a run: --resume continues runs only, choose another {COMMAND.folder}"
            )
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedhenError(f"cannot write to {parent}: {error.strerror}; choose another {COMMAND.folder}") from None
    return folders


def find_config(folder: Path) -> Path:
    """Returns the path of a run's configuration. Raises CheckpointError if the folder is not a run folder."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} is not a run folder: it has no {CONFIG}")
    return folder / CONFIG


def list_run_folders(folder: Path) -> list[Path]:
    """Returns the run folders in a folder, which may be one itself, in the order of their names."""
    return sorted(path.parent for depth in range(DEPTH + 1) for path in folder.glob("*/" * depth + CONFIG))


def find_run_folders(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields those of `paths` that are run folders, and the run folders in the others. Each must have one."""
    for path in paths:
        found = [path] if (path / CONFIG).is_file() else list_run_folders(path)
        if not found:
            raise CheckpointError(f"{path} is not a run folder and contains none: a run folder has a {CONFIG}")
        yield from found


def refuse_fleet_run(folder: Path) -> None:
    """Raises FedhenError for a run of a real fleet: only its devices have the data and the state to continue it."""
    if (folder / FLEET).is_file():
        raise CheckpointError(f"{folder} is the run of a fleet: resume it with: {resume_command(folder)}")


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
            raise FedhenError(f"cannot write to {parent}: {error.strerror}; choose another folder") from None
    raise FedhenError(f"{parent}: no free folder name left for {name}")


def _holds_something(folder: Path) -> bool:
    # A process that was killed before its first write leaves only its lock and partial files.
    return folder.is_dir() and any(p.name != LOCK and not p.name.endswith(PART) for p in folder.iterdir())
