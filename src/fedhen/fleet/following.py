"""A run that another process plays, followed by its folder: every round that it records, as if it were played here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedhen.errors import UserError
from fedhen.fleet.link import Link
from fedhen.records import ROUNDS, SUMMARY, TIMING

LOOK, ASK = 0.5, 10.0
"""Seconds between looks into the folder, and between questions to the SuperLink, which are dear."""


def follow(link: Link, number: str, folder: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """Every new round with its timing, until the run has ended."""
    seen = len(lines(folder / TIMING))
    asked = time.monotonic()
    while True:
        rounds, timings = lines(folder / ROUNDS), lines(folder / TIMING)
        # The timing is written last, after the checkpoint.
        yield from list(zip(rounds, timings, strict=False))[seen:]
        seen = max(seen, min(len(rounds), len(timings)))
        if (folder / SUMMARY).is_file() and len(timings) == len(rounds):
            return
        if time.monotonic() - asked >= ASK:
            asked, status = time.monotonic(), link.status(number)
            if status == "finished:completed":
                # All is written by then, here or where the server is.
                yield from list(zip(lines(folder / ROUNDS), lines(folder / TIMING), strict=False))[seen:]
                return
            if status.startswith("finished"):
                raise UserError(ended(status, folder, link, link.why(number)))
        time.sleep(LOOK)


def ended(status: str, folder: Path, link: Link, why: str) -> str:
    """Why a run ended before its time, and how to go on."""
    rounds = len(lines(folder / TIMING))
    go_on = f"; {rounds} rounds are saved, go on with: fedhen fleet run {link.folder.path} --resume {folder}"
    return f"the run has ended ({status.partition(':')[2] or status}){': ' * bool(why)}{why}{go_on * bool(rounds)}"


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that is being written."""
    if not path.is_file():
        return []
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
