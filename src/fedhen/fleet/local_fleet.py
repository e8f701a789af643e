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
FAST_POLLING = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
"""Nodes on this machine look for work more often than Flower's second."""
SUPERLINK_START_SECONDS = 60.0
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
    report: Callable[[str], None] = lambda phase: None
    """Hears what is begun: the programs take their time."""

    def __post_init__(self) -> None:
        self.project = FleetProject(self.path, f"127.0.0.1:{free_port()}", self.secure)
        self.processes = Processes(self.path / "logs")
        self.superlink = SuperLinkClient(self.project, self.processes)
        self.device_of = {name: device for device, name in enumerate(node_names(self.nodes))}

    @contextmanager
    def start(self) -> Iterator[LocalFleet]:
        """Inside, the fleet is up; afterwards no process of it is left."""
        try:
            self.project.write(self.config, self.nodes)
            self.project.use_recipe_data()
            self.report("starting the SuperLink")
            self.start_superlink()
            self.report(f"starting {len(self.device_of)} nodes")
            for name in self.device_of:
                if self.secure:
                    self.superlink.register(name)
                self.start_node(name)
            self.report("starting the run, which waits for its nodes")
            yield self
        finally:
            self.processes.stop()

    def start_superlink(self) -> None:
        """The server's end."""
        home, database = self.path / NODES / SUPERLINK, self.path / "superlink.db" if self.database else None
        self.processes.start(SUPERLINK, self.project.superlink_command(database), home, **FAST_POLLING)
        self.superlink.wait(SUPERLINK_START_SECONDS, SUPERLINK)

    def start_node(self, name: str) -> None:
        """A node, of the tier and with the device number that its name says."""
        home = self.path / NODES / name
        node: dict[str, str | int] = {
            "tier": name.rpartition("-")[0],
            "device": self.device_of[name],
            "state": str(home / "state"),
        }
        self.processes.start(name, self.project.supernode_command(name, free_port(), node), home, **FAST_POLLING)

    def play(self, run: Path, resume: bool = False) -> Iterator[tuple[dict[str, Any], Any]]:
        """Start a training and follow its rounds."""
        after = last_round(run)
        yield from follow(
            self.superlink, self.superlink.start(self.config, run, resume), run, after, self.config.rounds
        )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
