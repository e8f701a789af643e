"""Nodes of a real fleet come and go while it trains, its operator sees them, and its models go home."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedhen.cli import main
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.experiment.runner import play_run
from fedhen.fleet.board import NodeState, read_board
from fedhen.fleet.local_fleet import LocalFleet
from fedhen.fleet.project import NODES as FOLDER
from fedhen.fleet.project import fit_to_nodes
from fedhen.fleet.status import find_status, note_run
from support.fleets import give_secret, plan_roster, same_models, start_planned
from support.kills import wait_for

pytestmark = [pytest.mark.fleet, pytest.mark.process, pytest.mark.slow]

NODES = {"simple": 1, "complex": 1}
APP = """
import time
from dataclasses import replace
from pathlib import Path

from flwr.clientapp import ClientApp

from fedhen.fleet.app import recipe_app
from fedhen.fleet.apps import client_app, server_app
from support.fleets import give_secret, config_of_everyone

OWN = recipe_app()
APP = replace(OWN, training_data=lambda node, config: OWN.training_data(node, config_of_everyone(config, ["simple"])))
server = server_app(APP)
client = ClientApp()
honest, here = client_app(APP), Path("{here}")
client.query()(lambda message, context: honest(message, context))
client.query("deliver")(lambda message, context: honest(message, context))


@client.train()
def train(message, context):
    now = f"{{context.node_config['tier']}}-{{message.metadata.group_id}}"
    while (here / f"hold-{{now}}").exists():
        (here / f"held-{{now}}").touch()
        time.sleep(0.1)
    return honest(message, context)
"""
"""The data is dealt to the two devices of the beginning and one that joins. The complex one waits in held rounds."""


def choose_config() -> Config:
    """Returns a configuration in whose fourth round the first device, which leaves then, is not active."""
    settings = [
        *("data.limit=90", "training.epochs=1", "model.widths=[4, 4, 8, 8]", "evaluation.every=1", "rounds=8"),
        *("runtime.engine=plain", "checkpoint.rounds=1", "fleet.deadline_seconds=240", "local.name=scaffold"),
        "fleet.losses=true",
    ]
    chosen = toml.apply_settings(fit_to_nodes(load_recipe("digits"), NODES), settings)
    assert plan_roster(chosen, ["simple"], {2: 3}, {}).draw(4, {}) == [1, 2], "as the secret of these tests draws"
    return chosen


@pytest.fixture
def local_fleet(tmp_path: Path) -> Iterator[LocalFleet]:
    fleet = LocalFleet(tmp_path / "fleet", choose_config(), NODES, database=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent), prepend=os.pathsep)
        with fleet.start():
            (fleet.path / "fleet_app" / "apps.py").write_text(APP.format(here=tmp_path))
            fleet.device_of["simple-2"] = 2
            fleet.accept_app()
            yield fleet
    assert fleet.processes.find_running() == []


def test_join_in_round_3_leave_in_round_5_return_in_round_7(
    local_fleet: LocalFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With SCAFFOLD: the bytes of a simulation of the same membership. The changes happen while a round is held."""
    chosen, run = local_fleet.config, tmp_path / "run"
    for number in (2, 4, 6):
        (tmp_path / f"hold-complex-{number}").touch()

    def states() -> dict[str, NodeState]:
        board = read_board(run)
        return {node.name: node for node in board.nodes if node.name} if board is not None else {}

    def when_held(number: int) -> None:
        wait_for((tmp_path / f"held-complex-{number}").exists, 240)

    def release(number: int) -> None:
        (tmp_path / f"hold-complex-{number}").unlink()

    give_secret(run)
    note_run(local_fleet.project, run, local_fleet.superlink.start(chosen, run))
    when_held(2)
    local_fleet.start_node("simple-2")
    wait_for(lambda: "simple-2" in states() and states()["simple-2"].samples, 240)
    release(2)
    when_held(4)
    leaving = local_fleet.processes.running["simple-1"]
    leaving.terminate()
    leaving.wait(60)
    wait_for(lambda: not states()["simple-1"].online, 240)
    there = {node.name: node.state for node in find_status(local_fleet.project).nodes}
    assert there == {"simple-1": "offline", "complex-1": "online", "simple-2": "online"}
    release(4)
    when_held(6)
    local_fleet.start_node("simple-1")
    wait_for(lambda: states()["simple-1"].online, 240)
    release(6)
    wait_for((run / "summary.json").is_file, 240)
    simulated = tmp_path / "simulated"
    simulated.mkdir()
    roster = plan_roster(chosen, ["simple"], {2: 3}, {0: (5, 6)})
    for _ in play_run(simulated, start_planned(roster)):
        pass
    assert (run / "rounds.jsonl").read_bytes() == (simulated / "rounds.jsonl").read_bytes()
    assert same_models(run, simulated)
    devices = json.loads((run / "fleet.json").read_text())["devices"]
    assert [(d["name"], d["joined"], d["away"]) for d in devices] == [
        *(("simple-1", 1, [[5, 7]]), ("complex-1", 1, []), ("simple-2", 3, [])),
    ]
    assert main(["fleet", "status", str(local_fleet.path)]) == 0
    said = capsys.readouterr().out
    assert "3 of 3 nodes are online" in said and "8 of 8 rounds; finished" in said
    # The models go home, and can be used there without the run.
    assert main(["fleet", "deliver", str(run), "--fleet", str(local_fleet.path), "--export", "onnx"]) == 0
    assert capsys.readouterr().out.count(": has ") == 3
    model = local_fleet.path / FOLDER / "simple-2" / "state" / "models" / "current"
    assert (model / "manifest.json").is_file() and sorted(model.glob("*.onnx"))
    assert {node.model.partition(" ")[0] for node in find_status(local_fleet.project).nodes} == {"run"}
    assert main(["fleet", "stop", str(local_fleet.path)]) == 0
    assert "is not being played" in capsys.readouterr().err
