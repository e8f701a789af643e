"""Nodes come and go: a fleet inside one process produces the bytes of a simulation of the same membership."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch

import fedhen
from fedhen.cli import main
from fedhen.config.settings import Config
from fedhen.experiment import checkpoint_files
from fedhen.experiment.runner import play_run
from fedhen.fleet.apps import client_app
from fedhen.fleet.server import play
from fedhen.runs.reader import read_run
from support.fleets import fleet_config, fleet_run, joining_app, plan_roster, same_models, start_planned
from support.inside import InsideNode, grid
from support.stopped_runs import wait_for_writer

pytestmark = pytest.mark.fleet

NEWCOMER, ABSENT = 6, 1
JOINS, AWAY = {NEWCOMER: 3}, {ABSENT: (5, 6)}
"""A seventh device joins in round 3; device 1 leaves in round 5 and returns in round 7."""
MOMENTUM, WIDTH = "training.momentum=0.9", ["model.nesting=width", "model.rates={simple=0.5, complex=1.0}"]


class Comings:
    """A grid whose nodes come and go between rounds."""

    def __init__(self, chosen: Config, tier: str, state: Path) -> None:
        self.app = joining_app(chosen, [tier])
        self.grid = grid(chosen.tier_of_devices(), state, self.app)
        self.newcomer = InsideNode(
            {"tier": tier, "device": NEWCOMER, "state": str(state / "new")}, client_app(self.app)
        )
        self.gone = self.grid.nodes[1000 - 7 * ABSENT]

    def before(self, number: int) -> None:
        """Connects those that are there in a round. The one that returns has another node id."""
        nodes = self.grid.nodes
        if number >= JOINS[NEWCOMER]:
            nodes[4242] = self.newcomer
        nodes.pop(1000 - 7 * ABSENT, None)
        nodes.pop(77, None)
        if number not in AWAY[ABSENT]:
            nodes[1000 - 7 * ABSENT if number < 5 else 77] = self.gone


def play_membership(comings: Comings, chosen: Config, folder: Path, resume: bool = False, stop_after: int = 0) -> Path:
    """Plays a run, and leaves it after a round as a killed server does."""
    first = len((folder / "rounds.jsonl").read_text().splitlines()) + 1 if resume else 1
    comings.before(first)
    with closing(play(comings.grid, comings.app, fleet_run(chosen, folder, resume))) as steps:
        for number, _ in enumerate(steps, first):
            if number == stop_after:
                wait_for_writer()
                break
            comings.before(number + 1)
    return folder


def simulate_membership(chosen: Config, tier: str, folder: Path) -> Path:
    folder.mkdir()
    for _ in play_run(folder, start_planned(plan_roster(chosen, [tier], JOINS, AWAY))):
        pass
    return folder


@pytest.mark.parametrize(
    ("tier", "local", "more"),
    [
        ("simple", "scaffold", []),
        ("complex", "scaffold", ["devices.sampling=bernoulli", "training.optimizer_state=device", MOMENTUM]),
        ("complex", "feddyn", ["devices.sampling=by-tier", *WIDTH]),
    ],
    ids=str,
)
def test_nodes_that_come_and_go_give_the_simulators_bytes(
    tier: str, local: str, more: list[str], tmp_path: Path
) -> None:
    chosen = fleet_config("fedhen", local, "rounds=8", *more)
    here = play_membership(Comings(chosen, tier, tmp_path / "nodes"), chosen, tmp_path / "fleet")
    there = simulate_membership(chosen, tier, tmp_path / "simulated")
    assert (here / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    assert same_models(here, there)
    # The file of the fleet says the same: the rounds of the newcomer, and those of the device that was away.
    saved = json.loads((here / "fleet.json").read_text())["devices"]
    assert [(d["joined"], d["away"]) for d in saved] == [(1, []), (1, [[5, 7]]), *[(1, [])] * 4, (3, [])]
    rounds = read_run(here).rounds
    assert all(ABSENT not in record.active for record in rounds[4:6])
    assert all(NEWCOMER not in record.active for record in rounds[:2])
    assert any(NEWCOMER in record.active for record in rounds)
    assert "1 joined later" in read_overview(here)


def read_overview(folder: Path) -> str:
    assert main(["report", str(folder), "--out", str(folder / "report")]) == 0
    return next((folder / "report").glob("*.html")).read_text()


@pytest.mark.parametrize("killed_after", [2, 6])
def test_a_resumed_fleet_has_the_members_of_its_last_round(killed_after: int, tmp_path: Path) -> None:
    """Killed before the join, and before the return: what is played next knows of them again."""
    chosen = fleet_config("fedhen", "scaffold", "rounds=8", "devices.active=5")
    comings, run = Comings(chosen, "simple", tmp_path / "nodes"), tmp_path / "fleet"
    play_membership(comings, chosen, run, stop_after=killed_after)
    play_membership(comings, chosen, run, resume=True)
    there = simulate_membership(chosen, "simple", tmp_path / "simulated")
    assert (run / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    assert same_models(run, there)


def test_a_server_that_returns_to_before_a_join_does_not_give_the_number_again(tmp_path: Path) -> None:
    """The newcomer of round 3 is away when the server resumes after round 2, and another one comes: it is device 7."""
    chosen = fleet_config("fedhen", "plain", "rounds=5")
    comings, run = Comings(chosen, "simple", tmp_path / "nodes"), tmp_path / "fleet"
    play_membership(comings, chosen, run, stop_after=3)
    for path in (run / checkpoint_files.FOLDER).glob("round-000003.*"):
        path.unlink()
    other = InsideNode({**comings.newcomer.config, "state": str(tmp_path / "other")}, comings.newcomer.app)
    comings.grid.nodes = {n: node for n, node in comings.grid.nodes.items() if n != 4242} | {9: other}
    list(play(comings.grid, comings.app, fleet_run(chosen, run, resume=True)))
    devices = json.loads((run / "fleet.json").read_text())["devices"]
    assert [(d["joined"], d["away"]) for d in devices[6:]] == [(3, [[3]]), (3, [])]
    assert devices[7]["name"] == (tmp_path / "other" / "name").read_text()
    assert not any(6 in record.active for record in read_run(run).rounds)


def test_the_models_of_an_unfinished_run_count_the_newcomer(tmp_path: Path) -> None:
    """Read from a checkpoint: the all-devices average of round 4, with a newcomer, is the simulation's."""
    chosen = fleet_config("fedhen", "plain", "rounds=8", "evaluation.every=1")
    here = play_membership(Comings(chosen, "simple", tmp_path / "nodes"), chosen, tmp_path / "fleet", stop_after=4)
    experiment = start_planned(plan_roster(chosen, ["simple"], JOINS, AWAY))
    for step in experiment.play():
        if step.record["round"] == 4:
            break
    for tier, weights in experiment.complete_models()["devices"].items():
        with pytest.warns(UserWarning, match="its models are of round 4 of 8"):
            found = fedhen.load(here, tier, "devices").state_dict()
        assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_node_of_an_unknown_tier_does_not_join(tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "plain", "rounds=4")
    comings = Comings(chosen, "simple", tmp_path / "nodes")
    comings.newcomer.config["tier"] = "huge"
    with pytest.warns(UserWarning, match="node 4242 is left out: it is of tier 'huge'"):
        here = play_membership(comings, chosen, tmp_path / "fleet")
    assert len(json.loads((here / "fleet.json").read_text())["devices"]) == 6
