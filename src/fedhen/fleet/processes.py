"""Flower's programs as processes of ours: started with a mark, and none of them left when we go."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fedhen.errors import UserError

MARK = "FEDHEN_FLEET"
"""In the environment of all processes of a fleet, and of all that they start: so they are found again."""
GRACE_SECONDS = 5.0
"""Seconds that a process has to end by itself."""
FLOWER_OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""A fleet talks to nobody but itself."""


class Processes:
    """The processes of one fleet."""

    def __init__(self, logs: Path) -> None:
        self.logs, self.mark = logs, secrets.token_hex(8)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.watcher: subprocess.Popen[bytes] | None = None
        logs.mkdir(parents=True, exist_ok=True)

    def environment(self, home: Path) -> dict[str, str]:
        """With Flower's programs of this installation first in the path, since they start each other by name."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, **FLOWER_OFFLINE, "PATH": path, "FLWR_HOME": str(home), MARK: self.mark}

    def start(self, name: str, command: Sequence[str], home: Path, **more: str) -> subprocess.Popen[bytes]:
        """Start a program; what it prints goes to a log of its name."""
        home.mkdir(parents=True, exist_ok=True)
        self.watcher = self.watcher or _start_watcher(self.mark)
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [find_program(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.environment(home), **more},
                # Ctrl-C is for us: we take the others down, in order.
                start_new_session=True,
                preexec_fn=_end_with_us,
            )
        return self.running[name]

    def call(
        self, command: Sequence[str], home: Path, seconds: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; a Ctrl-C of the terminal is for us, and does not end it halfway."""
        return subprocess.run(
            [find_program(command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            env=self.environment(home),
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
            start_new_session=True,
            preexec_fn=_end_with_us,
        )

    def read_log(self, name: str) -> str:
        """What one of them has printed."""
        path = self.logs / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def find_running(self) -> list[psutil.Process]:
        """Finds every process that carries the mark, whatever its parent is by now."""
        return find_marked(self.mark)

    def stop(self) -> None:
        """End all of them: those started last first, gently; whatever is left after a while, for good.

        A second Ctrl-C leaves none behind: it only ends the gentle part.
        """
        with _undisturbed() as told:
            self._stop(told)

    def _stop(self, told: list[int]) -> None:
        for process in reversed(self.running.values()):
            process.terminate()
        end = time.monotonic() + GRACE_SECONDS
        while (left := self.find_running()) and time.monotonic() < end and not told:
            psutil.wait_procs(left, timeout=0.1)
        kill_marked(self.mark)
        for process in self.running.values():
            process.poll()
        self.running.clear()
        if self.watcher is not None:
            # It hears that we are done, finds nothing and ends.
            self.watcher.communicate()
            self.watcher = None


def find_program(name: str) -> str:
    """A program of this installation."""
    path = Path(sys.executable).parent / name
    if not path.is_file():
        raise UserError(f"{name} is not installed: pip install 'fedhen[flower]'")
    return str(path)


def find_marked(mark: str, variable: str = MARK) -> list[psutil.Process]:
    """Finds every other process with this mark in its environment."""
    found = []
    for process in psutil.process_iter():
        # It may end meanwhile, or belong to another user.
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(variable) == mark:
                found.append(process)
    return found


def kill_marked(mark: str) -> None:
    """Kills every other process with this mark, until none is left: they may start others meanwhile."""
    while left := find_marked(mark):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.1)


@contextmanager
def _undisturbed() -> Iterator[list[int]]:
    """Inside, signals are only noted, where this thread could hear them."""
    told: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: told.append(number)) for number in numbers}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_us() -> None:
    """In the child: a SIGTERM should the process that started it be killed (prctl's PR_SET_PDEATHSIG)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _start_watcher(mark: str) -> subprocess.Popen[bytes]:
    """A process that ends all with this mark should we be killed: `_end_with_us` reaches our own children alone.

    The pipe to it closes with us, however we end.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _watch(mark: str) -> None:
    """What the watcher does."""
    sys.stdin.buffer.read()
    kill_marked(mark)


if __name__ == "__main__":
    _watch(sys.argv[1])
