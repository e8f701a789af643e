"""`fedhen fleet serve`: runs the server side of a fleet, and starts again what ends by itself."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedhen.errors import FleetError
from fedhen.fleet.certificates import SERVER, ends_soon, find_end, renew_certificate
from fedhen.fleet.enrolment import Enrolment
from fedhen.fleet.gate_process import LISTENING
from fedhen.fleet.gate_rules import read_limits
from fedhen.fleet.processes import Processes, free_port
from fedhen.fleet.project import CERTIFICATES, DATABASE, LOCAL, LOGS, NODES, FleetProject, open_project
from fedhen.fleet.registration import register_nodes
from fedhen.fleet.serve_settings import ServeSettings, read_serve_settings
from fedhen.fleet.superlink import SuperLinkClient

SUPERLINK, GATE = "superlink", "gate"
START_SECONDS = 60.0
LOOK_SECONDS = 0.5
SHORTEST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Pauses before a program that has ended is started again. They double if it ends soon again."""
STEADY_SECONDS = 60.0
RENEW_SECONDS = 3600.0
"""How often the server looks whether its certificate ends."""


@dataclass
class Kept:
    """A program that is started again when it ends."""

    name: str
    command: Sequence[str]
    processes: Processes
    home: Path
    report: Callable[[str], None]
    pause: float = SHORTEST_PAUSE
    started: float = 0.0
    due: float = 0.0
    """When to start it again; 0 if it is running."""

    def start(self) -> None:
        self.processes.start(self.name, self.command, self.home)
        self.started, self.due = time.monotonic(), 0.0

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.processes.running[self.name]

    def keep(self) -> bool:
        """Starts the program again if it has ended. Returns whether it was started just now."""
        now = time.monotonic()
        if not self.due:
            if self.process.poll() is None:
                return False
            self.pause = SHORTEST_PAUSE if now - self.started > STEADY_SECONDS else self.pause * 2
            self.pause = min(self.pause, LONGEST_PAUSE)
            self.due = now + self.pause
            self.report(f"the {self.name} has ended (exit code {self.process.returncode}); it is started again")
        if now < self.due:
            return False
        self.start()
        return True


class Server:
    """The server side of a fleet: the SuperLink on loopback, the gate before it, and the registration of nodes."""

    def __init__(self, project: FleetProject, settings: ServeSettings, report: Callable[[str], None]) -> None:
        self.project, self.settings, self.report = project, settings, report
        self.processes = Processes(project.path / LOGS)
        self.superlink = SuperLinkClient(project, self.processes)
        self.enrolment = Enrolment(project.path)
        home = project.path / NODES / SUPERLINK
        self.kept = [
            Kept(SUPERLINK, project.superlink_command(project.path / DATABASE), self.processes, home, report),
            Kept(GATE, ["python", "-m", "fedhen.fleet.gate_process", str(project.path)], self.processes, home, report),
        ]
        self.registered: object = None
        """The version of the enrolled nodes that the SuperLink knows."""
        self.renewed = -RENEW_SECONDS

    def run(self) -> None:
        """Runs until a signal ends it. Afterwards none of its processes is left."""
        try:
            self.start()
            while True:
                time.sleep(LOOK_SECONDS)
                for kept in self.kept:
                    if kept.keep() and kept.name == SUPERLINK:
                        self.registered = None
                self.register()
                self.renew()
        finally:
            self.processes.stop()

    def renew(self) -> None:
        """Renews the certificate of the gate, which then reads it, before it ends."""
        if time.monotonic() - self.renewed < RENEW_SECONDS:
            return
        self.renewed = time.monotonic()
        folder = self.project.path / CERTIFICATES
        try:
            if ends_soon(folder):
                end, is_done = find_end(folder), renew_certificate(folder)
                outcome = "it was renewed" if is_done else "renew it: the fleet has not the key of its authority"
                self.report(f"the server's certificate ends on {end:%Y-%m-%d}: {outcome}")
        except FleetError as error:
            self.report(str(error))

    def start(self) -> None:
        self.renew()
        if self.superlink.is_up():
            raise FleetError(
                f"a SuperLink answers at {self.project.address} already: stop it, or change `superlink` in serve.toml"
            )
        superlink, gate = self.kept
        superlink.start()
        self.superlink.wait(START_SECONDS, SUPERLINK)
        self.register(at_once=True)
        log = self.project.path / LOGS / f"{GATE}.log"
        before = log.stat().st_size if log.is_file() else 0
        gate.start()
        end = time.monotonic() + START_SECONDS
        while LISTENING.encode() not in (said := log.read_bytes()[before:]):
            if gate.process.poll() is not None or time.monotonic() > end:
                last = said.decode(errors="replace").strip().rpartition("\n")[2]
                raise FleetError(f"the gate does not start: {last.partition('fedhen: ')[2] or f'see {log}'}")
            time.sleep(0.1)
        self.report(f"nodes connect to {self.settings.address}; the gate listens on {self.settings.listen}")

    def register(self, at_once: bool = False) -> None:
        """Registers the enrolled nodes at the SuperLink if they have changed."""
        path = self.enrolment.path
        version = (path.stat().st_mtime_ns, path.stat().st_ino) if path.is_file() else ()
        if version == self.registered:
            return
        try:
            for message in register_nodes(self.project, self.enrolment.read()):
                self.report(message)
            self.registered = version
        except FleetError as error:
            # The SuperLink may be restarting: it is tried again in a moment.
            if at_once:
                raise
            self.report(str(error))


def open_server(folder: Path, report: Callable[[str], None]) -> Server:
    """Opens the server of a fleet's folder. Writes what an older folder lacks."""
    project = open_project(folder)
    if not (folder / CERTIFICATES / SERVER).is_file():
        raise FleetError(f"{folder / CERTIFICATES / SERVER} is missing: the gate needs a certificate for TLS")
    settings = read_serve_settings(folder)
    if settings is None:
        project = FleetProject(folder, f"127.0.0.1:{free_port()}", project.secure, project.address)
        project.write_gate()
        project.write_connection()
        settings = read_serve_settings(folder)
    assert settings is not None
    if project.address != settings.superlink:
        project = FleetProject(folder, settings.superlink, True, settings.address)
        project.write_connection()
    read_limits(settings.limits)
    if (folder / CERTIFICATES / LOCAL).is_dir() and ends_soon(folder / CERTIFICATES / LOCAL):
        project.write_local_certificates()
    return Server(project, settings, report)
