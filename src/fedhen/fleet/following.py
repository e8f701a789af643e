"""A run that another process plays, followed by its folder: every round that it records, as if it were played here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedhen import salvage
from fedhen.errors import UserError
from fedhen.fleet.link import Link
from fedhen.records import ROUNDS, SUMMARY, TIMING

LOOK, ASK = 0.5, 10.0
"""Seconds between looks into the folder, and between questions to the SuperLink, which are dear."""
PATIENCE = 3
"""Questions in a row without an answer, after which the SuperLink is gone: it may be starting again."""


def follow(
    link: Link, number: str, folder: Path, planned: int, go_on: str = ""
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Every new round with its timing, until the run has ended with so many rounds; `go_on` is told if with fewer."""
    seen = len(lines(folder / TIMING))
    asked, silent = time.monotonic(), 0
    while True:
        rounds, timings = lines(folder / ROUNDS), lines(folder / TIMING)
        # The timing is written last, after the checkpoint.
        yield from list(zip(rounds, timings, strict=False))[seen:]
        seen = max(seen, min(len(rounds), len(timings)))
        if finished(folder) >= planned and len(timings) == len(rounds):
            return
        if time.monotonic() - asked >= ASK:
            status, why = answer(link, number)
            asked, silent = time.monotonic(), silent + 1 if why else 0
            if silent >= PATIENCE:
                raise UserError(ended("the SuperLink does not answer", folder, why, go_on))
            if status == "finished:completed":
                # All is written by then, here or where the server is.
                yield from list(zip(lines(folder / ROUNDS), lines(folder / TIMING), strict=False))[seen:]
                return
            if status.startswith("finished"):
                raise UserError(ended(status, folder, link.why(number), go_on))
        time.sleep(LOOK)


def finished(folder: Path) -> int:
    """The rounds after which a run was finished; a summary of fewer than planned is from before they were added."""
    try:
        return salvage.whole((salvage.json_object(folder / SUMMARY) or {"rounds": 0})["rounds"])
    except (OSError, *salvage.WRONG):
        return 0


def answer(link: Link, number: str) -> tuple[str, str]:
    """What the SuperLink says of a run, or why it says nothing."""
    try:
        return link.status(number), ""
    except UserError as error:
        return "", str(error)


def ended(status: str, folder: Path, why: str, go_on: str) -> str:
    """Why a run ended before its time, and how to go on."""
    rounds = len(lines(folder / TIMING))
    saved = f"; {rounds} rounds are saved{f', go on with: {go_on}' if go_on else f' in {folder}'}"
    return f"the run has ended ({status.partition(':')[2] or status}){': ' * bool(why)}{why}{saved * bool(rounds)}"


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that is being written."""
    if not path.is_file():
        return []
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
