"""Follows a run that another process plays, by reading the rounds that it records in the run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhen.errors import FedhenError, FleetError
from fedhen.fileio import untrusted
from fedhen.fileio.locks import is_locked
from fedhen.fleet.run_settings import START_ANOTHER_RUN
from fedhen.fleet.superlink import SuperLinkClient
from fedhen.runs.layout import ROUNDS, SUMMARY, TIMING

FOLDER_POLL_SECONDS, STATUS_POLL_SECONDS = 0.5, 10.0
"""Intervals between readings of the folder, and between queries of the SuperLink, each of which starts a process."""
MAX_UNANSWERED = 3
"""Number of consecutive queries without an answer after which the SuperLink counts as gone: it may be restarting."""
KILLED_SECONDS = 5.0
"""After this long without its process, a run was killed. One that ends by itself has told Flower by then."""


def follow(
    superlink: SuperLinkClient,
    number: str,
    folder: Path,
    after: int,
    planned: int,
    resume_command: str = "",
    look: Callable[[], None] = lambda: None,
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields every round after `after` with its timing, until `planned` rounds are played.

    Raises `FleetError` if the run ends before that. The message names `resume_command`, if it is given. `look` is
    called every time before it reads.
    """
    asked_at, unanswered, playing = time.monotonic(), 0, PlayingProcess(folder)
    while True:
        look()
        # Read first: the summary is written after all rounds, so no round can be missed below.
        is_over = read_finished_rounds(folder) >= planned
        for record, timing in read_new_rounds(folder, after):
            yield record, timing
            after = record["round"]
        if is_over:
            return
        is_killed = playing.is_gone()
        if is_killed or time.monotonic() - asked_at >= STATUS_POLL_SECONDS:
            status, why = ask_status(superlink, number)
            asked_at, unanswered = time.monotonic(), unanswered + 1 if why else 0
            if unanswered >= MAX_UNANSWERED:
                raise FleetError(explain_end("the SuperLink does not answer", folder, why, resume_command))
            if status == "finished:completed":
                # All rounds are written by now, in this folder or on the server's machine.
                yield from read_new_rounds(folder, after)
                return
            if status.startswith("finished"):
                raise FleetError(explain_end(status, folder, superlink.find_error(number), resume_command))
            if is_killed:
                raise FleetError(explain_end("the process of its server was killed", folder, "", resume_command))
        time.sleep(FOLDER_POLL_SECONDS)


@dataclass
class PlayingProcess:
    """The process that plays a run, if it is on this machine: it has locked the folder. Flower misses it a minute."""

    folder: Path
    last: float = 0.0
    """When it was there last; 0 if it was not there yet."""

    def is_gone(self) -> bool:
        if is_locked(self.folder):
            self.last = time.monotonic()
        return bool(self.last) and time.monotonic() - self.last > KILLED_SECONDS


def read_new_rounds(folder: Path, after: int = 0) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Reads the complete rounds after `after`. A round is complete when its timing is written, after the checkpoint."""
    timings = {timing["round"]: timing for timing in untrusted.read_json_lines(folder / TIMING, _check_timing)[0]}
    rounds = untrusted.read_json_lines(folder / ROUNDS, _check_round)[0][after:]
    return [(record, timings[record["round"]]) for record in rounds if record["round"] in timings]


def last_round(folder: Path) -> int:
    """Returns the last complete round in a folder, or 0."""
    return max((record["round"] for record, _ in read_new_rounds(folder)), default=0)


def _check_timing(timing: Mapping[str, Any], line: int) -> None:
    untrusted.check_int(timing["round"])


def _check_round(record: Mapping[str, Any], line: int) -> None:
    if untrusted.check_int(record["round"]) != line:
        raise ValueError("a round is missing")


def read_finished_rounds(folder: Path) -> int:
    """Returns the number of rounds in the run's summary, or 0. It may date from before rounds were added."""
    try:
        return untrusted.check_int((untrusted.read_json(folder / SUMMARY) or {"rounds": 0})["rounds"])
    except (OSError, *untrusted.PARSE_ERRORS):
        return 0


def ask_status(superlink: SuperLinkClient, number: str) -> tuple[str, str]:
    """Returns a run's status and "", or "" and the reason why the SuperLink does not answer."""
    try:
        return superlink.status(number), ""
    except FedhenError as error:
        return "", str(error)


def explain_end(status: str, folder: Path, why: str, resume_command: str) -> str:
    """Explains why a run ended early, and how to resume it unless that is of no use."""
    message = f"the run has ended ({status.partition(':')[2] or status}){': ' * bool(why)}{why}"
    rounds = last_round(folder)
    if not rounds or why.endswith(START_ANOTHER_RUN):
        return message
    saved = f"{message}; {rounds} rounds are saved"
    return f"{saved}; resume with: {resume_command}" if resume_command else f"{saved} in {folder}"
