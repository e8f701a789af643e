"""A run that another process plays, followed by its folder: every round that it records, as if it were played here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedhen.errors import UserError
from fedhen.fileio import untrusted
from fedhen.fleet.run_settings import START_ANOTHER_RUN
from fedhen.fleet.superlink import SuperLinkClient
from fedhen.runs.layout import ROUNDS, SUMMARY, TIMING

FOLDER_POLL_SECONDS, STATUS_POLL_SECONDS = 0.5, 10.0
"""Seconds between looks into the folder, and between questions to the SuperLink, which are dear."""
MAX_UNANSWERED = 3
"""Questions in a row without an answer, after which the SuperLink is gone: it may be starting again."""


def follow(
    superlink: SuperLinkClient, number: str, folder: Path, after: int, planned: int, resume_command: str = ""
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields every round after `after` with its timing, until `planned` rounds are played."""
    asked_at, unanswered = time.monotonic(), 0
    while True:
        # Looked at first: the summary is written after all rounds, so that those read after it are all.
        is_over = read_finished_rounds(folder) >= planned
        for record, timing in read_new_rounds(folder, after):
            yield record, timing
            after = record["round"]
        if is_over:
            return
        if time.monotonic() - asked_at >= STATUS_POLL_SECONDS:
            status, why = ask_status(superlink, number)
            asked_at, unanswered = time.monotonic(), unanswered + 1 if why else 0
            if unanswered >= MAX_UNANSWERED:
                raise UserError(explain_end("the SuperLink does not answer", folder, why, resume_command))
            if status == "finished:completed":
                # All is written by then, here or where the server is.
                yield from read_new_rounds(folder, after)
                return
            if status.startswith("finished"):
                raise UserError(explain_end(status, folder, superlink.find_error(number), resume_command))
        time.sleep(FOLDER_POLL_SECONDS)


def read_new_rounds(folder: Path, after: int = 0) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The later rounds that a folder holds whole; a round's timing is written last, after the checkpoint."""
    timings = {timing["round"]: timing for timing in untrusted.read_json_lines(folder / TIMING, _check_timing)[0]}
    rounds = untrusted.read_json_lines(folder / ROUNDS, _check_round)[0][after:]
    return [(record, timings[record["round"]]) for record in rounds if record["round"] in timings]


def last_round(folder: Path) -> int:
    """The last round that a folder holds whole, 0 if none."""
    return max((record["round"] for record, _ in read_new_rounds(folder)), default=0)


def _check_timing(timing: Mapping[str, Any], line: int) -> None:
    untrusted.check_int(timing["round"])


def _check_round(record: Mapping[str, Any], line: int) -> None:
    if untrusted.check_int(record["round"]) != line:
        raise ValueError("the rounds do not follow each other")


def read_finished_rounds(folder: Path) -> int:
    """The rounds after which a run was finished; a summary of fewer than planned is from before they were added."""
    try:
        return untrusted.check_int((untrusted.read_json(folder / SUMMARY) or {"rounds": 0})["rounds"])
    except (OSError, *untrusted.PARSE_ERRORS):
        return 0


def ask_status(superlink: SuperLinkClient, number: str) -> tuple[str, str]:
    """What the SuperLink says of a run, or why it says nothing."""
    try:
        return superlink.status(number), ""
    except UserError as error:
        return "", str(error)


def explain_end(status: str, folder: Path, why: str, resume_command: str) -> str:
    """Why a run ended before its time, and how to go on where that is of use."""
    said = f"the run has ended ({status.partition(':')[2] or status}){': ' * bool(why)}{why}"
    rounds = last_round(folder)
    if not rounds or why.endswith(START_ANOTHER_RUN):
        return said
    return (
        f"{said}; {rounds} rounds are saved{f', go on with: {resume_command}' if resume_command else f' in {folder}'}"
    )
