"""Reads the records of rounds that a crash may have torn."""

from __future__ import annotations

import json
from pathlib import Path

from fedhen.fileio.untrusted import PARSE_ERRORS


def read_whole_lines(path: Path, last: int) -> list[bytes]:
    """Returns the lines of rounds 1 to `last`, up to the first that is torn or out of order."""
    lines: list[bytes] = []
    if last and path.is_file():
        for line in path.read_bytes().splitlines(keepends=True)[:last]:
            try:
                if not line.endswith(b"\n") or json.loads(line)["round"] != len(lines) + 1:
                    break
            except PARSE_ERRORS:
                break
            lines.append(line)
    return lines
