"""The error that a user can fix: it is shown as one line, without a traceback, and the command exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """An error that the user can fix. Commands print its one-line message without a traceback and exit with 2."""


def one_line(text: str) -> str:
    """Returns text as one line without control characters, safe to print on a terminal."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UserError:
    """Returns the error for a name that is not known, with the nearest one that is."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {str(name)!r}: {hint}choose from {', '.join(names)}")
