"""Ctrl-C and SIGTERM: the first saves the last whole round and says how to go on, a second Ctrl-C ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedhen.errors import Stopped
from fedhen.ranks import here

if TYPE_CHECKING:
    from fedhen.playing import Stop

PATIENCE = 3.0
"""Seconds that the round under way may still take; a longer one is abandoned."""
AGAIN = 0.1
"""Seconds to the next try, where just then something was written."""


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Inside, signals become the wish to stop.

    Ranks are told to stop when another has died, and must not wait for it: there a signal ends the process at once.
    """
    from fedhen.playing import Abandoned, Stop

    stop = Stop()
    if here().number > 1 or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def told(number: int, frame: Any) -> None:
        if stop.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not stop.playing:
            raise Stopped(number)
        if not stop.signal:
            stop.signal = number
            signal.setitimer(signal.ITIMER_REAL, PATIENCE, AGAIN)

    def enough(number: int, frame: Any) -> None:
        if stop.in_round:
            stop.in_round = False
            raise Abandoned

    handlers = {signal.SIGINT: told, signal.SIGTERM: told, signal.SIGALRM: enough}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
