"""One piece of work at a time beside the run: a checkpoint goes to the disk while the next rounds are played."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from threading import Thread
from types import TracebackType

from fedhen.interrupts import StopNow

PATIENCE = 1.0
"""Seconds that nobody needs to be told about."""


class BackgroundTask:
    """Work in a thread, which is waited for before the next, and at the end."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Start it when the one before has ended."""
        self.end()
        # It does not hold up a process that is told to end at once.
        self._thread = Thread(target=self._do, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error

    def end(self, told: str = "") -> None:
        """Wait for it, and tell why if it takes long; what it raised is raised here."""
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if told and self._thread.is_alive():
                warnings.warn(told, stacklevel=2)
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> BackgroundTask:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # The folder is not let go of while something is written into it, unless the process is about to end.
        if kind is None or not issubclass(kind, StopNow):
            self.end()
