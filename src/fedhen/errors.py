"""The one error a user can cause: it is shown as one line, without a traceback, and the command exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can mend; the message says what, in one line."""


def one_line(text: str) -> str:
    """Text from anywhere as one line that cannot steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not among the known ones, with the nearest one that is."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {str(name)!r}: {hint}choose from {', '.join(names)}")
