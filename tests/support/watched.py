"""A fleet inside one process with an operator: its folder, its enrolled nodes, its status and its page."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.proto.node_pb2 import NodeInfo

from fedhen.config.recipes import load_recipe
from fedhen.devices.population import assign_tiers
from fedhen.fleet import status
from fedhen.fleet.enrolment import Enrolment
from fedhen.fleet.live_page import LivePage, PageServer, open_page
from fedhen.fleet.new_project import create_project
from fedhen.fleet.node_file import enrol
from fedhen.fleet.project import FleetProject
from support.fleets import fleet_config
from support.inside import grid


def no_data(node: Any, config: Any) -> Any:
    raise FileNotFoundError(2, "No such file or directory", "/data/ward-3.npz")


class Watched:
    """A fleet's folder with a run inside this process, whose SuperLink is played by the grid."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = FleetProject(tmp_path / "my-fleet", "127.0.0.1:1", public="127.0.0.1:2")
        create_project(self.project, load_recipe("digits"), {"simple": 1, "complex": 1})
        self.chosen = fleet_config("fedhen", "plain", "rounds=3", "devices.active=6", "evaluation.every=1")
        self.inside = grid(assign_tiers(self.chosen), tmp_path / "nodes")
        self.run = tmp_path / "run"
        self.run.mkdir()
        tiers = assign_tiers(self.chosen)
        for device in range(6):
            enrol(self.project.path, f"ward-{device}", tiers[device], tmp_path / f"ward-{device}.toml")
            self.inside.nodes[1000 - 7 * device].config["name"] = f"ward-{device}"
        self.known = set(self.inside.nodes)
        status.note_run(self.project, self.run, "7")
        # A SuperLink's list of its nodes; the real one is asked in test_fleet_operator_processes.py.
        monkeypatch.setattr(status, "list_nodes", self.list_nodes)

    def list_nodes(self, project: FleetProject) -> list[NodeInfo]:
        enrolled = Enrolment(self.project.path).read()
        return [
            NodeInfo(
                node_id=node,
                status="online" if node in self.inside.nodes else "offline",
                public_key=enrolled[f"ward-{(1000 - node) // 7}"].pem,
                online_until=time.time(),
            )
            for node in self.known
        ]

    def find(self) -> status.FleetStatus:
        return status.find_status(self.project)


@contextmanager
def served(page: LivePage, listen: str) -> Iterator[PageServer]:
    with open_page(page, listen) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
