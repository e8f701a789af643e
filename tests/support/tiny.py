"""The tiny configuration: the smallest run on the digits in which both tiers train and some devices are idle."""

from __future__ import annotations

from collections.abc import Iterable

TINY = ["data.limit=80", "devices.number=4", "devices.active=2", "training.epochs=1", "model.widths=[4, 4, 8, 8]"]
"""Settings. A later one of the same name wins: append what a test needs otherwise."""


def as_options(settings: Iterable[str]) -> list[str]:
    """Returns the settings as options of the command line."""
    return [f"--set={setting}" for setting in settings]


TINY_OPTIONS = as_options(TINY)
