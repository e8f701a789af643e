"""A whole fleet on this machine: SuperLink, nodes and a run, and everything taken down again."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhen.config.settings import Config
from fedhen.fleet.follow import follow, last_round
from fedhen.fleet.processes import Processes
from fedhen.fleet.project import NODES, FleetProject, node_names
from fedhen.fleet.superlink import SuperLinkClient

SUPERLINK = "superlink"
EAGER = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
"""Nodes on this machine look for work more often than Flower's second."""
START = 60.0
"""Seconds that a SuperLink has to come up."""


@dataclass
class LocalFleet:
    """A fleet on this machine; inside `running`, it is up."""

    path: Path
    config: Config
    nodes: Mapping[str, int]
    """Tier -> how many nodes."""
    secure: bool = False
    database: bool = False
    """Whether the SuperLink remembers its nodes and runs should it be killed."""
    tell: Callable[[str], None] = lambda phase: None
    """Hears what is begun: the programs take their time."""

    def __post_init__(self) -> None:
        self.folder = FleetProject(self.path, f"127.0.0.1:{free_port()}", self.secure)
        self.processes = Processes(self.path / "logs")
        self.link = SuperLinkClient(self.folder, self.processes)
        self.places = {name: place for place, name in enumerate(node_names(self.nodes))}

    @contextmanager
    def running(self) -> Iterator[LocalFleet]:
        """Inside, the fleet is up; afterwards no process of it is left."""
        try:
            self.folder.write(self.config, self.nodes)
            self.folder.as_trial()
            self.tell("starting the SuperLink")
            self.start_superlink()
            self.tell(f"starting {len(self.places)} nodes")
            for name in self.places:
                if self.secure:
                    self.link.register(name)
                self.start_node(name)
            self.tell("starting the run, which waits for its nodes")
            yield self
        finally:
            self.processes.stop()

    def start_superlink(self) -> None:
        """The server's end."""
        home, database = self.path / NODES / SUPERLINK, self.path / "superlink.db" if self.database else None
        self.processes.start(SUPERLINK, self.folder.superlink(database), home, **EAGER)
        self.link.wait(START, SUPERLINK)

    def start_node(self, name: str) -> None:
        """A node, of the tier and with the device number that its name says."""
        home = self.path / NODES / name
        node: dict[str, str | int] = {
            "tier": name.rpartition("-")[0],
            "device": self.places[name],
            "state": str(home / "state"),
        }
        self.processes.start(name, self.folder.supernode(name, free_port(), node), home, **EAGER)

    def play(self, run: Path, resume: bool = False) -> Iterator[tuple[dict[str, Any], Any]]:
        """Start a training and follow its rounds."""
        after = last_round(run)
        yield from follow(self.link, self.link.start(self.config, run, resume), run, after, self.config.rounds)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
