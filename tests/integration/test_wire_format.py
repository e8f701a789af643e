"""What travels between server and nodes: configuration, identities, orders and weights, checked where they arrive."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from fedhen.config.settings import Config
from fedhen.data.digits import load_digits
from fedhen.devices.population import assign_tiers
from fedhen.errors import FedhenError
from fedhen.fleet import fleet_file, membership, wire_format
from fedhen.fleet.app import App, recipe_app
from fedhen.fleet.apps import client_app
from fedhen.fleet.client import FleetClient
from fedhen.fleet.server import play
from fedhen.fleet.wire_format import Malformed, Order
from fedhen.runs.reader import read_run
from support.fleets import fleet_config, fleet_run, play_fleet, play_grid, same_models, simulate
from support.inside import grid
from support.spoiling import (
    spoiling,
)

pytestmark = pytest.mark.fleet


def test_the_configuration_travels_once_to_each_node(tmp_path: Path) -> None:
    """Three rounds with all six devices. A resumed run is another server process, which sends it again."""
    chosen = fleet_config("fedhen", "plain", "rounds=4", "devices.active=6", "evaluation.every=1")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    run = play_grid(inside, replace(chosen, rounds=3), tmp_path / "fleet")
    assert sorted(inside.config_texts()) == sorted(inside.nodes)
    assert len([node for kind, node in inside.log if kind == "train"]) == 3 * 6
    play_grid(inside, chosen, run, resume=True)
    assert sorted(inside.config_texts()) == sorted([*inside.nodes] * 2)
    assert all(len([*(tmp_path / "nodes" / str(device)).glob("configs/*")]) == 2 for device in range(6))
    there = simulate(chosen, tmp_path / "simulated")
    assert (run / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()


def empty(state: Path) -> None:
    shutil.rmtree(state)
    state.mkdir()


def alter_config(state: Path) -> None:
    (stored,) = (state / "configs").iterdir()
    text = stored.read_text()
    assert "epochs = 1\n" in text
    stored.write_text(text.replace("epochs = 1\n", "epochs = 2\n"))


@pytest.mark.parametrize("damage", [empty, alter_config])
def test_a_node_without_the_configuration_gets_it_again_in_the_same_round(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    """Its state folder is empty, or the stored configuration was altered and must not be used."""
    chosen = fleet_config("fedhen", "plain", "rounds=3", "devices.active=6")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    steps = play(inside, recipe_app(), fleet_run(chosen, tmp_path / "fleet"))
    next(steps)
    damage(tmp_path / "nodes" / "2")
    records = [step.record for step in steps]
    assert Counter(inside.config_texts()) == {node: 2 if node == 1000 - 7 * 2 else 1 for node in inside.nodes}
    assert not any({"failed", "late"} & {*record} for record in records)
    there = simulate(chosen, tmp_path / "simulated")
    assert (tmp_path / "fleet" / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    assert same_models(tmp_path / "fleet", there)


def test_a_node_that_always_asks_for_the_configuration_is_left_out(tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "plain", "rounds=1", "devices.active=6")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    inside.nodes[1000].app = spoiling(lambda content: wire_format.pack_config_request())
    with pytest.warns(UserWarning, match="a device failed"):
        (record,) = read_run(play_grid(inside, chosen, tmp_path / "fleet")).rounds
    assert record.failed == [0] and inside.config_texts().count(1000) == 2


def test_a_configuration_that_does_not_match_its_digest_is_refused(tmp_path: Path) -> None:
    client = FleetClient(recipe_app(), {"tier": "simple", "device": 0, "state": str(tmp_path)}, 1)
    order = Order(
        "run", 1, "simple", 0, (1, 8, 8), 10, wire_format.digest_of("rounds = 1"), KEY, KEY, config_text="rounds = 2"
    )
    with pytest.raises(Malformed, match="does not match its digest"):
        client.find_config(order)
    assert [*tmp_path.iterdir()] == []


def test_each_node_is_asked_once_for_its_identity(tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "plain")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    play_grid(inside, chosen, tmp_path / "fleet")
    assert sorted(node for kind, node in inside.log if kind == "query") == sorted(inside.nodes)


def test_a_server_without_test_data_trains_the_same_models(tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "plain", "evaluation.devices=false")
    about = load_digits().describe()
    blind = replace(recipe_app(), test_data=lambda config: None, inputs=(1, 8, 8), classes=10, about=about)
    inside = grid(assign_tiers(chosen), tmp_path / "nodes", blind)
    for _ in play(inside, blind, fleet_run(chosen, tmp_path / "blind")):
        pass
    assert same_models(tmp_path / "blind", simulate(chosen, tmp_path / "simulated"))
    run = read_run(tmp_path / "blind")
    assert not run.summary.final and not any(r.accuracy for r in run.rounds)  # type: ignore[union-attr]


def test_an_app_can_have_its_own_models_and_data(tmp_path: Path) -> None:
    from support.families import two_exits

    def training_data(node: Any, config: Config) -> tuple[Any, Any]:
        made = torch.Generator().manual_seed(int(node["device"]))
        return torch.randn(20, 6, generator=made), torch.randint(0, 3, (20,), generator=made)

    own = App(training_data, inputs=(6,), classes=3, family=two_exits())
    chosen = fleet_config("fedhen", "scaffold", "evaluation.devices=false", "fleet.wait_seconds=1")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes", own)
    for _ in play(inside, own, fleet_run(chosen, tmp_path / "own")):
        pass
    run = read_run(tmp_path / "own")
    assert len(run.rounds) == 3 and run.config["model"]["family"] == "python"


@pytest.mark.parametrize("local", ["plain", "scaffold", "feddyn"])
def test_the_recorded_bytes_are_those_that_are_sent(local: str, tmp_path: Path) -> None:
    """Except for names and shapes. FedDyn sends only its weights, SCAFFOLD as much again as it trains."""
    chosen = fleet_config("fedhen", local, "rounds=1", "devices.active=6", "model.widths=[16, 16, 32, 32]")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    seen: dict[str, int] = {"down": 0, "up": 0}

    def counted(way: str, content: RecordDict) -> RecordDict:
        records = [record for record in content.values() if isinstance(record, ArrayRecord)]
        seen[way] += sum(len(array.data) for record in records for array in record.values())
        return content

    honest = client_app(recipe_app())
    app = ClientApp()
    app.query()(lambda message, context: honest(message, context))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        counted("down", message.content)
        reply = honest(message, context)
        counted("up", reply.content)
        return reply

    for node in inside.nodes.values():
        node.app = app
    (record,) = read_run(play_grid(inside, chosen, tmp_path / "fleet")).rounds
    for way in ("down", "up"):
        recorded = sum(record.bytes[way].values())
        assert recorded <= seen[way] <= 1.1 * recorded


def test_an_incomplete_fleet_reports_what_is_missing(tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "plain", "fleet.wait_seconds=0.1")
    inside = grid(assign_tiers(chosen)[:4], tmp_path / "nodes")
    with pytest.raises(FedhenError, match="4 of 6 devices have connected"):
        play_grid(inside, chosen, tmp_path / "fleet")
    fleet_of_simple = grid(["simple"] * 6, tmp_path / "others")
    with pytest.raises(FedhenError, match="no node of tier 'complex'"):
        play_grid(fleet_of_simple, chosen, tmp_path / "second")


def test_a_fleet_cannot_resume_a_simulated_run_nor_the_reverse(tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "plain", "rounds=1")
    there = simulate(chosen, tmp_path / "simulated")
    with pytest.raises(FedhenError, match="was not played by a fleet; resume"):
        play_grid(grid(assign_tiers(chosen), tmp_path / "n"), replace(chosen, rounds=2), there, resume=True)
    here = play_fleet(chosen, tmp_path / "fleet", tmp_path / "nodes")
    with pytest.raises(FedhenError, match="fedhen fleet run --resume"):
        import fedhen

        fedhen.resume(here, rounds=2)


KEY = "0a" * 32
IDENTITY = {"tier": "simple", "samples": 3, "name": "one", "place": -1}
ORDER = {
    **{"run": "run", "round": 1, "tier": "simple", "memory": 0, "inputs": [1, 8, 8], "classes": 10},
    **{"config_digest": "0" * 64, "key": KEY, "initial_key": KEY, "omega": 0.5, "fixed_digest": "", "config_text": ""},
}


@pytest.mark.parametrize(
    ("name", "values", "field", "value"),
    [
        *(("node", IDENTITY, "samples", value) for value in (0, True, "3", 2.0, 2**41)),
        *(("node", IDENTITY, "name", value) for value in (3, "x" * 101)),
        *(("node", IDENTITY, "place", value) for value in (-2, "0")),
        *(("order", ORDER, "round", value) for value in (0, "1", 1.0)),
        *(("order", ORDER, "inputs", value) for value in ([0], ["1"], 8)),
        *(("order", ORDER, "omega", value) for value in (-1.0, float("nan"), "1")),
        *(("order", ORDER, name, value) for name in ("key", "initial_key") for value in ("", "0" * 62, "g" * 64, 7)),
        *(("order", ORDER, "fixed_digest", value) for value in (0, "../fixed", "0" * 63)),
        *(("order", ORDER, "config_digest", value) for value in ("", "../config", "0" * 63, "G" * 64)),
    ],
)
def test_records_are_checked_when_they_are_read(name: str, values: dict[str, Any], field: str, value: Any) -> None:
    read: Callable[[RecordDict], object] = wire_format.read_identity if name == "node" else wire_format.read_order
    whole = {"format": wire_format.FORMAT, **values}
    read(RecordDict({name: ConfigRecord(whole)}))
    missing = {key: whole[key] for key in whole if key != field}
    for wrong in ({**whole, field: value}, {**whole, "format": 1}, *([] if field == "omega" else [missing])):
        with pytest.raises(Malformed) as told:
            read(RecordDict({name: ConfigRecord(wrong)}))
        assert str(told.value).isprintable()


@pytest.mark.parametrize("change", [{"run": 3}, {"devices": [{"tier": "simple"}]}, {"devices": 3}, {"flower": "x"}])
def test_a_damaged_fleet_file_is_refused_in_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "plain")
    whole = {"run": "r", "flower": "7", "devices": [{**IDENTITY, "node": "12"}] * 6}
    (tmp_path / "fleet.json").write_text(json.dumps(whole))
    member = membership.read_membership(tmp_path, grid([], tmp_path), chosen, lambda board: None).members[5]
    assert (member.identity.samples, member.node, fleet_file.read_flower_run(tmp_path)) == (3, 12, "7")
    (tmp_path / "fleet.json").write_text(json.dumps({**whole, **change}))
    with pytest.raises(FedhenError, match=r"fleet\.json is damaged"):
        membership.read_membership(tmp_path, grid([], tmp_path), chosen, lambda board: None)
    assert fleet_file.read_flower_run(tmp_path) == ""


LIKE = {"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.float64), "c": torch.zeros(0, 4)}


def test_weights_are_unpacked_as_they_were_packed() -> None:
    sent = {"b": torch.tensor(2.5, dtype=torch.float64), "a": torch.randn(2, 3), "c": torch.zeros(0, 4)}
    back = wire_format.unpack_weights(wire_format.pack_weights(sent), LIKE)
    assert [*back] == [*LIKE] and all(torch.equal(back[name], sent[name]) for name in LIKE)


@given(st.integers(0, 10**6), st.integers(0, 255), st.integers(0, 40))
def test_altered_bytes_are_refused_or_have_the_right_shapes(place: int, byte: int, cut: int) -> None:
    data = bytearray(wire_format.pack_weights(LIKE)["weights"].data)
    data[place % len(data)] = byte
    data = data[: len(data) - cut]
    record = ArrayRecord({"weights": Array("uint8", (len(data),), "safetensors", bytes(data))})
    try:
        found = wire_format.unpack_weights(record, LIKE)
    except Malformed as error:
        assert str(error).isprintable()
        return
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, t.dtype) for n, t in LIKE.items()}
