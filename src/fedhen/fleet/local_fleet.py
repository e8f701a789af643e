"""A whole fleet on this machine: starts a SuperLink and nodes, plays a run, and stops all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhen.config.settings import Config
from fedhen.fleet.app_digest import build_bundle, digest_bundle
from fedhen.fleet.certificates import CA, make_node_key
from fedhen.fleet.follow import follow, last_round
from fedhen.fleet.node_file import NodeFile
from fedhen.fleet.processes import Processes, free_port
from fedhen.fleet.project import CERTIFICATES, KEYS, NODES, FleetProject, node_names
from fedhen.fleet.superlink import SuperLinkClient

SUPERLINK = "superlink"
FAST_POLLING = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
"""The SuperLink starts a run sooner than after Flower's second."""
SUPERLINK_START_SECONDS = 60.0


@dataclass
class LocalFleet:
    """A fleet on this machine. It runs inside the context `start()`."""

    path: Path
    config: Config
    nodes: Mapping[str, int]
    """Tier -> number of nodes."""
    secure: bool = False
    database: bool = False
    """Whether the SuperLink keeps its nodes and runs in a file, so that it can be restarted."""
    report: Callable[[str], None] = lambda phase: None
    """Called with a message before each phase, since starting takes some time."""

    def __post_init__(self) -> None:
        self.project = FleetProject(self.path, f"127.0.0.1:{free_port()}", self.secure)
        self.processes = Processes(self.path / "logs")
        self.superlink = SuperLinkClient(self.project, self.processes)
        self.keys: dict[str, str] = {}
        self.device_of = {name: device for device, name in enumerate(node_names(self.nodes))}

    @contextmanager
    def start(self) -> Iterator[LocalFleet]:
        """Runs the fleet inside the context. Afterwards none of its processes is left."""
        try:
            self.project.write(self.config, self.nodes)
            self.project.use_recipe_data()
            self.report("starting the SuperLink")
            self.start_superlink()
            self.accept_app()
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
        home, database = self.path / NODES / SUPERLINK, self.path / "superlink.db" if self.database else None
        self.processes.start(SUPERLINK, self.project.superlink_command(database), home, **FAST_POLLING)
        self.superlink.wait(SUPERLINK_START_SECONDS, SUPERLINK)

    def start_node(self, name: str) -> None:
        home = self.path / NODES / name
        node = ["--state", str(home / "state"), "--set", f"device={self.device_of[name]}"]
        node += ["--set", f"seed={self.config.seed}"]
        command = ["python", "-P", "-m", "fedhen", "fleet", "node", str(self.node_file(name)), *node]
        self.processes.start(name, command, home)

    def node_file(self, name: str) -> Path:
        return self.path / NODES / f"{name}.toml"

    def accept_app(self) -> None:
        """Writes the files of the nodes, which accept the app as it is now. Nodes read them when a run begins."""
        app = digest_bundle(build_bundle(self.path))
        certificate = (self.path / CERTIFICATES / CA).read_text(encoding="ascii") if self.secure else ""
        for name in self.device_of:
            path, tier = self.node_file(name), name.rpartition("-")[0]
            path.unlink(missing_ok=True)
            NodeFile(name, tier, self.project.address, (app,), certificate, self.find_key(name)).write(path)

    def find_key(self, name: str) -> str:
        """Returns the key of a node. Without TLS it is only what the node is recognised by."""
        if self.secure:
            return (self.path / KEYS / name).read_text(encoding="ascii")
        if name not in self.keys:
            self.keys[name] = make_node_key()[0]
        return self.keys[name]

    def play(self, run: Path, resume: bool = False) -> Iterator[tuple[dict[str, Any], Any]]:
        """Starts a run and yields its rounds."""
        after = last_round(run)
        yield from follow(
            self.superlink, self.superlink.start(self.config, run, resume), run, after, self.config.rounds
        )
