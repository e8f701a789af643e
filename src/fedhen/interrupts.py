"""Ctrl-C and SIGTERM: everything that handles signals.

A run that is played finishes the current round, or abandons it after a few seconds, saves the last whole round and
raises `RunStopped`. A second Ctrl-C raises `StopNow` and waits for nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ROUND_SECONDS = 3.0
"""Seconds that the current round may still take after a signal; then it is abandoned."""
RETRY_SECONDS = 0.1
"""Seconds until the next attempt to abandon a round, if the last one came while a file was written."""
LOST_RANK_SECONDS = 10.0
"""Seconds that a rank has to end by itself after it has lost another rank."""

Handler = Callable[[int, Any], None]


class RunStopped(BaseException):
    """A run that was asked to stop has stopped."""

    def __init__(self, signal: int, message: str = "stopped", abandoned: bool = False) -> None:
        super().__init__(message)
        self.signal, self.abandoned = signal, abandoned


class StopNow(KeyboardInterrupt):
    """A second Ctrl-C: the process ends without waiting for anything."""


class RoundAbandoned(BaseException):
    """Raised inside a round that takes too long after a signal."""


@dataclass
class StopRequest:
    """A request to stop, which a run checks after each round."""

    signal: int = 0
    """The signal that was received, or 0."""
    is_running: bool = False
    """Whether a run is being played, which will check the request."""
    in_round: bool = False
    """Whether a round is being played, which may be abandoned; everything else has to be finished."""

    @contextmanager
    def play(self) -> Iterator[None]:
        """Marks that a run is being played."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    @contextmanager
    def round(self) -> Iterator[None]:
        """Marks that a round is being played."""
        self.in_round = True
        try:
            yield
        finally:
            self.in_round = False

    def note(self, number: int) -> None:
        """Notes a signal for the end of the round. If no run is being played, raises `RunStopped` at once."""
        if self.signal and number == signal.SIGINT:
            raise StopNow
        if not self.is_running:
            raise RunStopped(number)
        self.signal = self.signal or number


@contextmanager
def stop_after_round() -> Iterator[StopRequest]:
    """Turns signals into a request to stop. A round that takes longer than `ROUND_SECONDS` is abandoned."""
    stop = StopRequest()

    def note(number: int, frame: Any) -> None:
        first = not stop.signal
        stop.note(number)
        if first:
            signal.setitimer(signal.ITIMER_REAL, ROUND_SECONDS, RETRY_SECONDS)

    def abandon(number: int, frame: Any) -> None:
        if stop.in_round:
            stop.in_round = False
            raise RoundAbandoned

    with handling({**dict.fromkeys(STOP_SIGNALS, note), signal.SIGALRM: abandon}) as handled:
        try:
            yield stop
        finally:
            if handled:
                signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def stop_ranks_after_round(rank: int, has_lost: Callable[[], bool]) -> Iterator[StopRequest]:
    """The same for one of several ranks. No rank can abandon a round alone, so a long round is lost.

    `has_lost` says whether this rank has lost another one.
    """
    stop = StopRequest()

    def note(number: int, frame: Any) -> None:
        # A rank that has lost another reports that: SIGTERM from torchrun must not interrupt it.
        if number == signal.SIGINT or not has_lost():
            stop.note(number)

    with handling(dict.fromkeys(STOP_SIGNALS, note)):
        undo = exit_on_signal(rank, has_lost, ROUND_SECONDS, lambda: stop.is_running and not stop.in_round)
        try:
            yield stop
        finally:
            undo()


def exit_on_signal(
    rank: int, has_lost: Callable[[], bool], seconds: float = 0.0, busy: Callable[[], bool] = bool
) -> Callable[[], None]:
    """Ends this rank after a signal, even if its main thread waits for a rank that is gone. Returns a function to undo.

    The rank has `seconds` to end by itself, and more while it is `busy`. It runs in a thread, since the main thread may
    be inside a reduction that no other rank takes part in any more.
    """
    if not _in_main_thread():
        return lambda: None
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before, over = signal.set_wakeup_fd(writer, warn_on_full_buffer=False), threading.Event()

    def watch() -> None:
        while (number := os.read(reader, 1)[0]) not in STOP_SIGNALS:
            pass
        if over.wait(seconds):
            return
        while busy():
            if over.wait(0.1):
                return
        if has_lost():
            # The rank reports the loss itself; if it continues all the same, it is ended.
            if over.wait(LOST_RANK_SECONDS):
                return
        else:
            why = "by a signal, or since another rank has ended; resume with `fedhen resume`"
            print(f"fedhen: rank {rank} stopped: {why}", file=sys.stderr, flush=True)
        os._exit(128 + number)

    def undo() -> None:
        over.set()
        signal.set_wakeup_fd(before)

    threading.Thread(target=watch, daemon=True).start()
    return undo


@dataclass
class FirstSignal:
    """Raises `RunStopped` on the first signal, so that what was started is cleaned up; later signals are ignored."""

    held: bool = False
    """Whether the first signal is kept until `release`."""
    number: int = 0

    def note(self, number: int, frame: Any) -> None:
        """Notes a signal."""
        if not self.number:
            self.number = number
            if not self.held:
                raise RunStopped(number)

    def release(self) -> None:
        """Raises for a signal that was kept, and from now on at once."""
        self.held = False
        if self.number:
            raise RunStopped(self.number)


@contextmanager
def stop_on_first_signal() -> Iterator[FirstSignal]:
    """Raises `RunStopped` inside the block on the first signal."""
    first = FirstSignal()
    with handling(dict.fromkeys(STOP_SIGNALS, first.note)):
        yield first


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Only collects the signals that are received inside the block."""
    received: list[int] = []
    with handling(dict.fromkeys(STOP_SIGNALS, lambda number, _: received.append(number))):
        yield received


@contextmanager
def block_signals() -> Iterator[None]:
    """Delays signals until the end of the block, so that a fork does not inherit a half-handled one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """In a forked process: ignores the signals, which the parent handles."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def handling(handlers: Mapping[int, Handler]) -> Iterator[bool]:
    """Installs handlers for the block, and yields whether it could: Python allows that in the main thread alone."""
    if not _in_main_thread():
        yield False
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
