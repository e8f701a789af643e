"""Files that may be torn, altered or hostile: what of them can be trusted is read, and all else is told."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

LONGEST_LINE, LARGEST, LARGEST_TABLE = 1 << 24, 1 << 30, 1 << 22
"""Bytes of a line, of a file of lines, and of a file that is read in one piece: ours are far smaller."""
MOST = 2**63
"""No number of ours is larger."""

Check = Callable[[Mapping[str, Any], int], None]
"""(object, number of its line) -> a ValueError, KeyError or TypeError if it is not what it should be."""
PARSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What untrusted values raise when they are read as if they could be trusted."""


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file."""
    return tomllib.loads(_whole(path))


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, none where there is no such file."""
    if not path.is_file():
        return None
    value = parse_json(_whole(path))
    if not isinstance(value, dict):
        raise TypeError(f"{path.name} is no object")
    return value


def read_json_lines(path: Path, check: Check) -> tuple[list[dict[str, Any]], str]:
    """The objects before the first line that is wrong, and what is wrong with it, nothing if all is well.

    A last line without an end is what a crash leaves behind: it is torn, and no line before it is in doubt.
    """
    found: list[dict[str, Any]] = []
    if not path.is_file():
        return found, ""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path.name} is larger than {LARGEST >> 30} GiB")
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            number = len(found) + 1
            if line.isspace():
                continue
            try:
                value = parse_json(line.decode("utf-8"))
                check(value, number)
                found.append(value)
            except PARSE_ERRORS as error:
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    return found, f"the last line of {path.name} is torn"
                return found, f"{path.name} is damaged from line {number} on: {describe_error(error)}"
    return found, ""


def parse_json(text: str) -> Any:
    """JSON, strictly: NaN and infinity are no numbers."""
    return json.loads(text, parse_constant=_no_number)


def describe_error(error: BaseException) -> str:
    """What is wrong, in a few words."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"no {error}" if isinstance(error, KeyError) else f"{str(error) or type(error).__name__}"[:200]


def check_number(value: Any, least: float = 0, most: float = MOST) -> float:
    """A number between two others."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{str(value)[:40]!r} is no number")
    if not least <= value <= most:
        raise ValueError(f"{value} is out of range")
    return value


def check_int(value: Any, least: int = 0) -> int:
    """A whole number, at least so large."""
    if not isinstance(value, int):
        raise TypeError(f"{str(value)[:40]!r} is no whole number")
    return int(check_number(value, least))


def check_text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


def check_mapping(value: Any) -> Mapping[str, Any]:
    """A table."""
    if not isinstance(value, dict):
        raise TypeError(f"{str(value)[:40]!r} is no table")
    return value


def _whole(path: Path) -> str:
    if path.stat().st_size > LARGEST_TABLE:
        raise ValueError(f"{path.name} is larger than {LARGEST_TABLE >> 20} MiB")
    return path.read_text(encoding="utf-8")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
