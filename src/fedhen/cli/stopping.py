"""Ctrl-C and SIGTERM: the first saves the last whole round and says how to go on, a second Ctrl-C ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedhen.distributed.communicator import current_ranks
from fedhen.errors import RunStopped, StopNow

if TYPE_CHECKING:
    from fedhen.interrupts import Stop

PATIENCE = 3.0
"""Seconds that the round under way may still take; a longer one is abandoned."""
AGAIN = 0.1
"""Seconds to the next try, where just then something was written."""


@contextmanager
def handle_interrupts() -> Iterator[Stop]:
    """Inside, signals become the wish to stop."""
    from fedhen.interrupts import Stop

    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    with _together(stop) if current_ranks().number > 1 else _alone(stop):
        yield stop


@contextmanager
def _alone(stop: Stop) -> Iterator[None]:
    """A round that takes longer than our patience is abandoned, and the one before is saved."""
    from fedhen.interrupts import Abandoned

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, PATIENCE, AGAIN)

    def enough(number: int, frame: Any) -> None:
        if stop.in_round:
            stop.in_round = False
            raise Abandoned

    with _handled({signal.SIGINT: _told(stop, wait), signal.SIGTERM: _told(stop, wait), signal.SIGALRM: enough}):
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _together(stop: Stop) -> Iterator[None]:
    """Ranks save a round that all have finished; one that takes longer is lost, since none can leave it alone."""
    from fedhen.distributed.process_group import exit_on_signal, has_lost

    note = _told(stop, lambda: None)

    def told(number: int, frame: Any) -> None:
        # A rank that has lost another is about to say so: torchrun's SIGTERM must not come in between.
        if number == signal.SIGINT or not has_lost():
            note(number, frame)

    with _handled({signal.SIGINT: told, signal.SIGTERM: told}):
        undo = exit_on_signal(current_ranks().rank, PATIENCE, lambda: stop.playing and not stop.in_round)
        try:
            yield
        finally:
            undo()


def _told(stop: Stop, wait: Callable[[], None]) -> Callable[[int, Any], None]:
    """What a signal does: it is noted for the end of the round, where one is played."""

    def told(number: int, frame: Any) -> None:
        if stop.signal and number == signal.SIGINT:
            raise StopNow
        if not stop.playing:
            raise RunStopped(number)
        if not stop.signal:
            stop.signal = number
            wait()

    return told


@contextmanager
def _handled(handlers: Mapping[int, Callable[[int, Any], None]]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
