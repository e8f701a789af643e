"""Differential privacy in a fleet: fresh noise, a lasting account, and nodes that check the promise themselves."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedhen.config.settings import Config
from fedhen.devices.population import assign_tiers
from fedhen.errors import FedhenError
from fedhen.experiment.build import build_experiment
from fedhen.fleet import wire_format
from fedhen.fleet.app import recipe_app
from fedhen.fleet.client import FleetClient
from fedhen.fleet.fleet_roster import FleetRoster
from fedhen.fleet.membership import Membership
from fedhen.fleet.need_to_know import describe_run
from fedhen.fleet.server import FleetRun, play
from fedhen.fleet.wire_format import Order
from fedhen.params import Weights
from fedhen.privacy.accounting import default_delta, gaussian_epsilon
from fedhen.privacy.participation import make_turns
from fedhen.runs.private import read_participation
from support.fleets import SECRET, fleet_config, play_fleet, play_grid, same_models
from support.inside import InsideGrid, grid
from support.refused import REFUSED

pytestmark = pytest.mark.fleet
CENTRAL = ("privacy.mechanism=central", "privacy.bound=0.5", "privacy.noise=0.5")
FLEET = (*CENTRAL, "privacy.separation=2", "devices.active=2", "evaluation.devices=false", "fleet.losses=false")
KEY = "0a" * 32


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def play_rounds(inside: InsideGrid, config: Config, folder: Path, number: int) -> None:
    """Plays some rounds of a run, which is then interrupted."""
    rounds = play(inside, recipe_app(), FleetRun(config, folder, poll=0.0))
    for _ in range(number):
        next(rounds)
    rounds.close()


def test_a_fleets_noise_is_fresh_and_its_account_survives_a_lost_checkpoint(tmp_path: Path) -> None:
    """The third round was released, then its checkpoint is lost: it is played again, with other noise, and counted.

    With b = 2, z = 0.5: 3 releases make 2 participations, and one more in a new stream of noise. The devices that have
    taken part in the third round rest, so that it is noise alone when it is played again.
    """
    config = fleet_config("fedhen", "plain", *FLEET)
    folder, inside = tmp_path / "run", grid(assign_tiers(config), tmp_path / "state")
    play_rounds(inside, config, folder, 3)
    lost = {path.name: path.read_bytes() for path in (folder / "checkpoints").glob("round-000003*")}
    for name in lost:
        (folder / "checkpoints" / name).unlink()
    assert json.loads((folder / "private" / "ledger.json").read_text()) == {"streams": [3]}
    (folder / "summary.json").unlink(missing_ok=True)
    first = lines(folder)
    with pytest.warns(UserWarning, match="a device failed"):
        play_grid(inside, config, folder, resume=True)
    assert json.loads((folder / "private" / "ledger.json").read_text()) == {"streams": [3, 1]}
    again, summary = lines(folder), json.loads((folder / "summary.json").read_text())
    assert again[:2] == first[:2]
    assert lost and all((folder / "checkpoints" / name).read_bytes() != content for name, content in lost.items())
    assert again[2]["epsilon"] == gaussian_epsilon(math.sqrt(2 + 1) / 0.5, default_delta(6)) > first[2]["epsilon"]
    assert (summary["privacy"]["epsilon"], summary["privacy"]["releases"]) == (again[2]["epsilon"], 4)
    assert "guarantee" not in summary["privacy"]
    took_part = [set(line["active"]) for line in read_participation(folder, 3)]
    assert all(took_part) and took_part[0].isdisjoint(took_part[1]) and took_part[1].isdisjoint(took_part[2])
    errors = (folder / "private" / "errors.jsonl").read_text()
    assert "this device took part in round 3, and privacy.separation=2 lets it rest until round 5" in errors
    assert not (folder / "errors.jsonl").exists()


def test_two_fleets_with_the_same_secret_have_other_noise(tmp_path: Path) -> None:
    config = fleet_config("fedhen", "plain", *FLEET, "rounds=1")
    one, other = (play_fleet(config, tmp_path / name, tmp_path / f"state-{name}") for name in ("one", "other"))
    assert read_participation(one, 1) == read_participation(other, 1)
    assert not same_models(one, other)


def test_stand_ins_keep_the_separation(tmp_path: Path) -> None:
    """Whatever device is away, who stands in for it is one whose turn it is; a newcomer changes nobody's turn."""
    config = fleet_config("fedhen", "plain", *FLEET)
    tiers = assign_tiers(config)
    inside = grid(tiers, tmp_path)
    membership = Membership(inside, describe_run(config))
    membership.wait_for_nodes(6, 1.0, tuple(config.tiers))
    membership.number_devices(tuple(config.tiers))
    del inside.nodes[membership.members[0].node]
    membership.update()
    population = build_experiment(config, accelerator="cpu", secret=SECRET).population
    roster, find_turn = FleetRoster(population, membership, tmp_path, 0), make_turns(config, tiers, SECRET)
    for number in range(1, 21):
        drawn = set(roster.draw(number, {}))
        assert len(drawn) == 2 and 0 not in drawn and drawn <= find_turn(number) and len(find_turn(number)) == 3
        assert make_turns(config, [*tiers, "simple"], SECRET)(number) - {6} == find_turn(number)


def order_of(config: Config, number: int, run: str = "run") -> Any:
    """Builds an order to a simple device, as a server would that does not check its settings."""
    text = describe_run(config)
    order = Order(*(run, number, "simple", 0, (1, 8, 8), 10, wire_format.digest_of(text), KEY, KEY), config_text=text)
    return wire_format.pack_order(order, wire_format.pack_weights(simple_model()))


@cache
def simple_model() -> Weights:
    return build_experiment(fleet_config("fedhen", "plain"), accelerator="cpu", secret=SECRET).server["simple"]


def node(state: Path) -> FleetClient:
    return FleetClient(recipe_app(), {"tier": "simple", "device": 0, "state": str(state)}, 1)


def answer_of(client: FleetClient, content: Any) -> str:
    """Returns why a node does not train, or "" if it does."""
    answer = client.train(content)
    return str(answer["failure"]["error"]) if "failure" in answer else ""


@pytest.mark.parametrize(("change", "message"), [*REFUSED, ("devices.sampling=bernoulli", "nobody can promise")])
def test_a_node_does_not_train_if_its_data_would_not_be_protected(change: str, message: str, tmp_path: Path) -> None:
    """The server would refuse the same settings: a node does not rely on it."""
    # Four of six devices cannot rest for two rounds.
    fitting = ("privacy.separation=1", "devices.active=4") if change.startswith("privacy.separation") else ()
    found = answer_of(node(tmp_path), order_of(fleet_config("fedhen", "plain", *FLEET, *fitting, change), 1))
    assert message in found


@pytest.mark.parametrize("change", ["fleet.spare_devices=1", "evaluation.devices=true", "devices.sampling=bernoulli"])
def test_the_server_of_a_fleet_refuses_them_too(change: str, tmp_path: Path) -> None:
    config = fleet_config("fedhen", "plain", *FLEET, "privacy.separation=1", change)
    with pytest.raises(FedhenError, match=r"privacy\.mechanism=central does not allow this"):
        play_fleet(config, tmp_path / "fleet", tmp_path / "state")


def test_a_node_rests_between_its_rounds(tmp_path: Path) -> None:
    """Whatever the server orders, also after a restart of the node and for a round that is played again."""
    config = fleet_config("fedhen", "plain", *FLEET, "privacy.separation=3", "devices.active=2")
    taken = []
    for number in (4, 4, 3, 5, 6, 7, 9, 10):
        if not answer_of(node(tmp_path), order_of(config, number)):
            taken.append(number)
    assert taken == [4, 7, 10]
    client = node(tmp_path)
    assert answer_of(client, order_of(config, 11, run="another")) == "", "another run is another account"
    note = tmp_path / "memory" / "run" / "last-round.json"
    note.write_text('{"round": "10"}')
    assert re.search("cannot be read, so the device does not take part", answer_of(client, order_of(config, 20)))


def test_a_node_that_cannot_note_its_round_does_not_answer(tmp_path: Path) -> None:
    config = fleet_config("fedhen", "plain", *FLEET)
    (tmp_path / "memory").write_text("a file where the folder should be")
    found = answer_of(node(tmp_path), order_of(config, 1))
    assert re.search(r"last-round\.json cannot be read|cannot note in .* that it takes part", found)
