"""Runs one task at a time in the background: a checkpoint is written while the next rounds are played."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from threading import Thread
from types import TracebackType

from fedhen.interrupts import StopNow

WARN_AFTER = 1.0
"""Seconds of waiting before a warning."""


class BackgroundTask:
    """A thread for one task at a time. The next task, and the end of the context, wait for it."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Waits for the last task and starts this one."""
        self.end()
        # A daemon, so that a process that must end at once does not wait for it.
        self._thread = Thread(target=self._do, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error

    def end(self, slow: str = "") -> None:
        """Waits for the task and raises what it raised. Warns with `slow`, if given, when that takes long."""
        if self._thread is not None:
            self._thread.join(WARN_AFTER)
            if slow and self._thread.is_alive():
                warnings.warn(slow, stacklevel=2)
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> BackgroundTask:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # The folder stays locked while the task writes to it, unless the process is about to end.
        if kind is None or not issubclass(kind, StopNow):
            self.end()
