"""The errors that a user can fix: each is shown as one line, without a traceback, and the command exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedhenError(ValueError):
    """An error that the user can fix. Commands print its one-line message without a traceback and exit with 2."""


class ConfigError(FedhenError):
    """A setting or an argument is wrong."""


class DataError(FedhenError):
    """Data is missing, cannot be read or does not fit."""


class CheckpointError(FedhenError):
    """A run folder, a checkpoint or a model file is missing, damaged or does not fit."""


class FleetError(FedhenError):
    """A real fleet cannot do what it should."""


UserError = FedhenError
"""The old name."""
LONGEST_WORD = 500
"""Longer words, which no path or name is, are cut where an error is printed."""


def one_line(text: str) -> str:
    """Returns text as one line without control characters or endless words, safe to print on a terminal."""
    words = (word if len(word) <= LONGEST_WORD else f"{word[:80]}...{word[-40:]}" for word in text.split())
    return "".join(char if char.isprintable() else "?" for char in " ".join(words))


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """Returns the error for a name that is not known, with the nearest one that is."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown {kind} {str(name)!r}: {hint}choose from {', '.join(names)}")
