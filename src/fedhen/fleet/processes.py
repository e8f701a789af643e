"""Starts Flower's programs with a mark in their environment, and ends all of them, however this process ends."""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from fedhen.errors import FleetError
from fedhen.interrupts import collect_signals

MARK = "FEDHEN_FLEET"
"""The environment variable that marks the processes of a fleet. All that they start inherit it."""
PORTS = range(20_000, 32_000)
GRACE_SECONDS = 5.0
"""Time that a process has to end by itself."""
FLOWER_OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""A fleet makes no connections except its own."""


class Processes:
    """The processes of one fleet."""

    def __init__(self, logs: Path) -> None:
        self.logs, self.mark = logs, secrets.token_hex(8)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.watcher: subprocess.Popen[bytes] | None = None
        logs.mkdir(parents=True, exist_ok=True)

    def environment(self, home: Path) -> dict[str, str]:
        # Flower's programs start each other by name: those of this installation come first.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, **FLOWER_OFFLINE, "PATH": path, "FLWR_HOME": str(home.absolute()), MARK: self.mark}

    def start(self, name: str, command: Sequence[str], home: Path, **more: str) -> subprocess.Popen[bytes]:
        """Starts a program. Its output goes to `logs/NAME.log`."""
        home.mkdir(parents=True, exist_ok=True)
        self.watcher = self.watcher or _start_watcher(self.mark)
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [find_program(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.environment(home), **more},
                # Ctrl-C reaches only this process, which then ends the others in order.
                start_new_session=True,
                preexec_fn=_end_with_us,
            )
        return self.running[name]

    def call(
        self, command: Sequence[str], home: Path, seconds: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end. Ctrl-C reaches only this process and does not interrupt the program."""
        home.mkdir(parents=True, exist_ok=True)
        return subprocess.run(
            [find_program(command[0]), *command[1:]],
            # In another folder, `flwr ls fleet` would take a folder called fleet for an app.
            cwd=home,
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
        path = self.logs / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def find_running(self) -> list[psutil.Process]:
        """Finds every process that carries the mark, whatever its parent is by now."""
        return find_marked(self.mark)

    def stop(self) -> None:
        """Terminates all programs, the last started first, and kills what is left after `GRACE_SECONDS`.

        A second Ctrl-C only ends the grace period. No process is left in any case.
        """
        with collect_signals() as told:
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
            # Closes its standard input: it finds nothing and ends.
            self.watcher.communicate()
            self.watcher = None


def free_port() -> int:
    """Returns a port of loopback that is not in use, and that no outgoing connection is given.

    Linux takes those from 32768 on, also one that was free when it was chosen for a server.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise FleetError(f"no free port was found between {PORTS.start} and {PORTS.stop}: choose one with --address")


def find_program(name: str) -> str:
    """Returns the path of a program of this installation. Raises `FleetError` if it is not installed."""
    path = Path(sys.executable).parent / name
    if not path.is_file():
        raise FleetError(f"{name} is not installed: pip install 'fedhen[flower]'")
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


def _end_with_us() -> None:
    """Runs in the child: it receives SIGTERM if this process is killed (PR_SET_PDEATHSIG of prctl)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _start_watcher(mark: str) -> subprocess.Popen[bytes]:
    """Starts a process that kills all marked processes if this one is killed: `_end_with_us` reaches children only.

    The pipe to it closes when this process ends, however it ends.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _watch(mark: str) -> None:
    sys.stdin.buffer.read()
    kill_marked(mark)


if __name__ == "__main__":
    _watch(sys.argv[1])
