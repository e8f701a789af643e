"""Signals: the wish to stop a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class Abandoned(BaseException):
    """Thrown into a round that is not to be waited for."""


@dataclass
class Stop:
    """Whether a run is told to stop: it hears it after each round."""

    signal: int = 0
    """Which signal said so."""
    playing: bool = False
    """Whether somebody will hear it."""
    in_round: bool = False
    """Whether a round is being played, which may be abandoned; else what is under way must be waited for."""

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, a run is played."""
        self.playing = True
        try:
            yield
        finally:
            self.playing = False

    @contextmanager
    def round(self) -> Iterator[None]:
        """Inside, a round is played."""
        self.in_round = True
        try:
            yield
        finally:
            self.in_round = False
