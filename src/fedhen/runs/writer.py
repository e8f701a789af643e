"""Writes a run folder while the run is played."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from fedhen.errors import FedhenError
from fedhen.fileio import untrusted
from fedhen.fileio.atomic import replace_file, write_json, write_text
from fedhen.runs.layout import CONFIG, ENVIRONMENT, ERRORS, FLEET, PRIVATE, ROUNDS, SUMMARY, TIMING, resume_command
from fedhen.runs.lines import read_whole_lines
from fedhen.runs.private import make_private
from fedhen.runs.records import DeviceError, parse_record

MAX_ERRORS = 100
"""Lines of errors.jsonl. Further errors would hardly tell more."""


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turns an OSError while a run is written into a FedhenError that says how to resume."""
    try:
        yield
    except OSError as error:
        # For a fleet's run, the command that follows it says how to resume.
        resume = "" if (folder / FLEET).is_file() else f", then resume with: {resume_command(folder)}"
        why = error.strerror or str(error)
        raise FedhenError(
            f"cannot write to {folder}: {why}: free some space{resume}; earlier rounds are kept"
        ) from None


def write_device_errors(folder: Path, number: int, failed: Mapping[int, str]) -> None:
    """Adds a round's failed devices to errors.jsonl; those of a round that is played again are replaced."""
    if not failed:
        return
    before: list[DeviceError] = []
    untrusted.read_json_lines(folder / ERRORS, lambda values, line: before.append(parse_record(DeviceError, values)))
    kept = [error for error in before if error.round < number]
    if len(kept) < MAX_ERRORS:
        kept += [DeviceError(number, device, error) for device, error in failed.items()]
        write_text(folder / ERRORS, "".join(json.dumps(asdict(error)) + "\n" for error in kept[:MAX_ERRORS]))


class RunWriter:
    """Writes the files of one run as the rounds are played."""

    def __init__(self, folder: Path, config_toml: str, environment: Mapping[str, Any], after: int = 0) -> None:
        """Starts a run, or resumes it after round `after` and discards the records of later rounds."""
        self.folder = folder
        # The configuration comes first: with it a run can be resumed, whatever else a crash leaves behind.
        write_text(folder / CONFIG, config_toml)
        write_json(folder / ENVIRONMENT, environment)
        cut_records(folder, after)
        # With more rounds to play, the run is no longer finished.
        (folder / SUMMARY).unlink(missing_ok=True)
        self._rounds: IO[str] = (folder / ROUNDS).open("a", encoding="utf-8")
        self._timing: IO[str] = (folder / TIMING).open("a", encoding="utf-8")

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rounds.close()
        self._timing.close()

    def write_round(self, record: Mapping[str, Any]) -> None:
        """Appends one round and flushes, so that a report of the unfinished run sees it."""
        _append(self._rounds, record)

    def write_private(self, values: Mapping[str, Any]) -> None:
        """Appends what only the server may see of a round, if there is anything. Must come before its record."""
        if values:
            make_private(self.folder)
            with (self.folder / PRIVATE / ROUNDS).open("a", encoding="utf-8") as file:
                _append(file, values)

    def write_timing(self, number: int, timing: Mapping[str, float]) -> None:
        """Appends the seconds of a round. To be called after its checkpoint, which they include."""
        _append(self._timing, {"round": number, **timing})

    def sync(self) -> None:
        """Flushes all lines to the disk."""
        for file in (self._rounds, self._timing):
            os.fsync(file.fileno())

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the summary, which marks the run as finished."""
        self.sync()
        write_json(self.folder / SUMMARY, summary)


def cut_records(folder: Path, after: int) -> None:
    """Removes the records of rounds after `after`."""
    private = [f"{PRIVATE}/{ROUNDS}"] if (folder / PRIVATE / ROUNDS).is_file() else []
    for name in (ROUNDS, TIMING, *private):
        replace_file(folder / name, b"".join(read_whole_lines(folder / name, after)))


def _append(file: IO[str], value: Mapping[str, Any]) -> None:
    file.write(json.dumps(value, allow_nan=False) + "\n")
    file.flush()
