"""Nodes whose connection is lost while the server waits for them, on the state of Flower's SuperLink."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from flwr.proto.node_pb2 import Node

from fedhen.config.settings import Config
from fedhen.devices.population import assign_tiers
from fedhen.fleet import engine
from fedhen.runs.reader import read_run
from support.fleets import fleet_config, play_grid, same_models, simulate
from support.inside import grid
from support.inside_superlink import InsideSuperLink

pytestmark = pytest.mark.fleet
AWAY = 3
"""For how many looks of the server a node is gone."""


@pytest.fixture
def chosen() -> Config:
    return fleet_config("fedhen", "scaffold", "devices.active=6", "rounds=2", "fleet.deadline_seconds=60")


def make_fleet(chosen: Config, state: Path) -> InsideSuperLink:
    nodes = grid(assign_tiers(chosen), state).nodes.values()
    return InsideSuperLink({f"node-{device}": node for device, node in enumerate(nodes)})


@dataclass
class Loses:
    """Loses the connection of a node after its answer of the first round, before the server takes the answer."""

    name: str
    returns: bool = True
    looks: list[str] = field(default_factory=list)

    def __call__(self, fleet: InsideSuperLink) -> None:
        if "1" not in fleet.answered[self.name] or len(self.looks) > AWAY:
            return
        if not self.looks:
            fleet.disconnect(self.name)
        elif len(self.looks) == AWAY and self.returns:
            fleet.connect(self.name)
        self.looks.append("gone")


@pytest.mark.slow
def test_an_answer_survives_the_loss_of_its_nodes_connection(chosen: Config, tmp_path: Path) -> None:
    """The run is the same as if nothing had happened: a simulation."""
    fleet = make_fleet(chosen, tmp_path / "state")
    fleet.look = loses = Loses("node-2")
    run = play_grid(fleet.grid(), chosen, tmp_path / "fleet")
    assert len(loses.looks) > AWAY, "the connection was not lost"
    simulated = simulate(chosen, tmp_path / "simulated")
    assert same_models(run, simulated)
    ours, theirs = read_run(run), read_run(simulated)
    assert [record.active for record in ours.rounds] == [record.active for record in theirs.rounds]
    assert not any([*record.failed, *record.late] for record in ours.rounds)


@pytest.mark.slow
def test_a_node_that_does_not_return_is_named(chosen: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "RETURN_SECONDS", 0.2)
    fleet = make_fleet(chosen, tmp_path / "state")
    fleet.look = Loses("node-2", returns=False)
    with pytest.warns(UserWarning, match="device 2, round 1: its connection was lost"):
        run = read_run(play_grid(fleet.grid(), chosen, tmp_path / "fleet"))
    assert [record.failed for record in run.rounds] == [[2], []]
    assert run.rounds[0].active == [0, 1, 2, 3, 4, 5] and run.rounds[1].active == [0, 1, 3, 4, 5]
    (error,) = (json.loads(line) for line in (run.folder / "errors.jsonl").read_text().splitlines())
    assert error == {"round": 1, "device": 2, "error": "its connection was lost before the server had its answer"}


@pytest.mark.slow
def test_a_slow_look_is_no_loss(chosen: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is away for a single look, which takes the SuperLink longer than the server waits for a return."""
    monkeypatch.setattr(engine, "RETURN_SECONDS", 0.2)
    fleet, looks = make_fleet(chosen, tmp_path / "state"), list[int]()

    def look(fleet: InsideSuperLink) -> None:
        if "1" in fleet.answered["node-2"]:
            looks.append(1)
            if len(looks) == 1:
                fleet.disconnect("node-2")
                time.sleep(0.5)
            elif len(looks) == 2:
                fleet.connect("node-2")

    fleet.look = look
    run = read_run(play_grid(fleet.grid(), chosen, tmp_path / "fleet"))
    assert len(looks) > 2 and not any([*record.failed, *record.late] for record in run.rounds)


@pytest.mark.slow
def test_an_answer_whose_transfer_has_begun_needs_its_node_no_more(chosen: Config, tmp_path: Path) -> None:
    """The server has seen what the answer consists of; then its parts arrive, and the node leaves for good."""
    fleet, finish, looks = make_fleet(chosen, tmp_path / "state"), list[Callable[[], None]](), list[int]()
    describe = fleet.describe

    def describe_only(node: Node, answer: Message) -> Callable[[], None]:
        send_parts = describe(node, answer)
        if node.node_id != fleet.numbers["node-2"] or answer.metadata.group_id != "1":
            return send_parts
        finish.append(send_parts)
        return lambda: None

    def look(fleet: InsideSuperLink) -> None:
        if finish:
            looks.append(1)
            if len(looks) == AWAY:
                finish[0]()
                fleet.disconnect("node-2")

    monkeypatched: Any = fleet
    monkeypatched.describe, fleet.look = describe_only, look
    run = read_run(play_grid(fleet.grid(), replace(chosen, rounds=1), tmp_path / "fleet"))
    assert len(looks) >= AWAY and [record.failed for record in run.rounds] == [[]]
