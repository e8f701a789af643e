"""Reads files that may be torn, altered or hostile, as far as they can be trusted."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn

LONGEST_LINE, LARGEST, LARGEST_TABLE = 1 << 24, 1 << 30, 1 << 22
"""Bytes of a line, of a file of lines, and of a file that is read at once; real ones are far smaller."""
MOST = 2**63
"""The largest number that a file may contain."""

Check = Callable[[Mapping[str, Any], int], None]
"""(object, its line number) -> None. Raises one of PARSE_ERRORS if the object is malformed."""
PARSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions that malformed input may raise while it is parsed."""


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file."""
    return tomllib.loads(_read_text(path))


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object, or returns None if the file does not exist."""
    if not path.is_file():
        return None
    value = parse_json(_read_text(path))
    if not isinstance(value, dict):
        raise TypeError(f"{path.name} is not a JSON object")
    return value


def read_json_lines(path: Path, check: Check) -> tuple[list[dict[str, Any]], str]:
    """Returns the objects before the first malformed line, and what is wrong with that line ("" if none is).

    A crash may leave a last line without an end. The lines before it can be trusted.
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
    """Parses JSON strictly: NaN and infinity are refused."""
    return json.loads(text, parse_constant=_refuse_constant)


def describe_error(error: BaseException) -> str:
    """Returns what is wrong, in a few words."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"no {error}" if isinstance(error, KeyError) else f"{str(error) or type(error).__name__}"[:200]


def check_number(value: Any, least: float = 0, most: float = MOST) -> float:
    """Returns a number between two others."""
    number: float = _check(value, int | float, "a number")
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a number")
    if not least <= number <= most:
        raise ValueError(f"{number} is out of range")
    return number


def check_int(value: Any, least: int = 0) -> int:
    """Returns a whole number that is at least `least`."""
    return int(check_number(_check(value, int, "a whole number"), least))


def check_text(value: Any) -> str:
    """Returns a string."""
    return str(_check(value, str, "a string"))


def check_mapping(value: Any) -> Mapping[str, Any]:
    """Returns a table."""
    table: Mapping[str, Any] = _check(value, dict, "a table")
    return table


def _check(value: Any, kind: type | UnionType, name: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{str(value)[:40]!r} is not {name}")
    return value


def _read_text(path: Path) -> str:
    if path.stat().st_size > LARGEST_TABLE:
        raise ValueError(f"{path.name} is larger than {LARGEST_TABLE >> 20} MiB")
    return path.read_text(encoding="utf-8")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
