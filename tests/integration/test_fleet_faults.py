"""Nodes that lie, vanish, return or are late: the server continues with the results of a simulation without them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from flwr.app import Message

from fedhen.cli.options import LOCALS
from fedhen.devices.population import assign_tiers
from fedhen.errors import FedhenError
from fedhen.experiment import checkpoint_files
from fedhen.fleet import server
from fedhen.fleet.app import recipe_app
from fedhen.fleet.apps import client_app
from fedhen.fleet.client_state import ClientState
from fedhen.fleet.server import play
from fedhen.runs.reader import read_run
from support.fleets import fleet_config, fleet_run, play_fleet, play_grid, same_models, simulate, simulate_with_only
from support.inside import InsideGrid, InsideNode, grid
from support.spoiling import (
    Spoil,
    another_record,
    below_the_least,
    claims_to_be_enormous,
    enormous,
    extra_name,
    garbage,
    missing_name,
    nan,
    negative_scale,
    new_record,
    no_loss,
    nothing,
    other_classes,
    place_beyond_the_end,
    places_of_deeper_weights,
    places_out_of_order,
    raised,
    spoiling,
    steering,
    two_arrays,
    uncoded,
    wrong_shape,
    wrong_type,
)

pytestmark = pytest.mark.fleet


SPOILED: list[tuple[Spoil, str]] = [
    (wrong_shape, "has shape"),
    (wrong_type, "another type"),
    (extra_name, "is unexpected"),
    (missing_name, "is missing"),
    (enormous, "bytes instead of"),
    (claims_to_be_enormous, "cannot be read"),
    (garbage, "cannot be read"),
    (another_record, "weights are missing"),
    (two_arrays, "weights are missing"),
    (nothing, "is missing"),
    (new_record, "is unexpected"),
    (no_loss, "loss"),
    (other_classes, "classes that do not exist"),
    (steering, "?[2J"),
    (raised, "ValueError"),
]


@pytest.mark.parametrize(("spoil", "told"), SPOILED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_malformed_answer_is_left_out(spoil: Spoil, told: str, tmp_path: Path) -> None:
    """The result is that of a simulation without the device, and the reason is in errors.jsonl."""
    chosen = fleet_config("fedhen", "plain", "rounds=1", "devices.active=6", "evaluation.devices=false")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    inside.nodes[1000 - 7 * 4].app = spoiling(spoil)
    with pytest.warns(UserWarning, match="a device failed"):
        here = play_grid(inside, chosen, tmp_path / "fleet")
    there = simulate_with_only(lambda _: [0, 1, 2, 3, 5], chosen, tmp_path / "simulated")
    (record,) = read_run(here).rounds
    assert record.failed == [4] and record.active == [*range(6)] and record.dropped == []
    (error,) = (json.loads(line) for line in (here / "errors.jsonl").read_text().splitlines())
    assert told in error["error"] and error["error"].isprintable() and len(error["error"]) <= 300
    assert same_models(here, there)


CODED: list[tuple[str, Spoil, str]] = [
    ("int8", below_the_least, "below -127"),
    ("int8", negative_scale, "negative"),
    ("int8", uncoded, "bytes instead of"),
    ("topk", place_beyond_the_end, "places of its update"),
    ("topk", places_out_of_order, "places of its update"),
    ("topk", places_of_deeper_weights, "places of its update"),
    ("topk", wrong_type, "another type"),
    ("bf16", missing_name, "bytes instead of"),
]


@pytest.mark.parametrize(("up", "spoil", "told"), CODED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_malformed_coded_answer_is_left_out(up: str, spoil: Spoil, told: str, tmp_path: Path) -> None:
    chosen = fleet_config(
        "fedhen", "plain", "rounds=1", "devices.active=6", "evaluation.devices=false", f"wire.up={up}"
    )
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    inside.nodes[1000 - 7 * 4].app = spoiling(spoil)
    with pytest.warns(UserWarning, match="a device failed"):
        here = play_grid(inside, chosen, tmp_path / "fleet")
    there = simulate_with_only(lambda _: [0, 1, 2, 3, 5], chosen, tmp_path / "simulated")
    (error,) = (json.loads(line) for line in (here / "errors.jsonl").read_text().splitlines())
    assert error["device"] == 4 and told in error["error"]
    assert same_models(here, there)


def test_nan_is_dropped(tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "plain", "rounds=1", "devices.active=6", "evaluation.devices=false")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    inside.nodes[1000 - 7 * 4].app = spoiling(nan)
    here = play_grid(inside, chosen, tmp_path / "fleet")
    assert read_run(here).rounds[0].dropped == [4]
    assert same_models(here, simulate_with_only(lambda _: [0, 1, 2, 3, 5], chosen, tmp_path / "simulated"))


@pytest.mark.parametrize("local", LOCALS)
def test_devices_that_diverge_are_dropped_as_in_a_simulation(local: str, tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", local, "rounds=2", "training.lr=1e30", "training.clip=1e30")
    here, there = play_fleet(chosen, tmp_path / "fleet", tmp_path / "nodes"), simulate(chosen, tmp_path / "simulated")
    assert read_run(here).rounds[0].dropped
    assert (here / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()


def test_an_answer_that_is_dropped_does_not_end_the_round(tmp_path: Path) -> None:
    """Device 0 answers first, with NaN. One answer is enough, but it must be finite."""

    class First(InsideGrid):
        looks: ClassVar[Counter[str]] = Counter()

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            numbers = list(message_ids)
            self.looks.update(numbers)
            mine = {number for number in numbers if self.replies[number].metadata.src_node_id == 1000}
            return super().pull_messages([n for n in numbers if n in mine or self.looks[n] > 2])

    chosen = fleet_config("fedhen", "plain", "rounds=1", "devices.active=6", "fleet.answers=1")
    inside = First(grid(assign_tiers(chosen), tmp_path / "nodes").nodes)
    inside.nodes[1000].app = spoiling(nan)
    (record,) = read_run(play_grid(inside, chosen, tmp_path / "fleet")).rounds
    assert record.dropped == [0] and record.loss is not None and not record.late


def test_a_delayed_order_does_not_remove_a_later_memory(tmp_path: Path) -> None:
    """The order of round 2 is carried out after that of round 3."""
    files, memory = ClientState(tmp_path, "run"), {"w": torch.ones(2)}
    for number, before in ((1, 0), (3, 1), (2, 1)):
        files.write(number, {"w": memory["w"] * number}, before)
    assert torch.equal(files.read(3, memory)["w"], torch.tensor([3.0, 3.0]))


def test_one_node_is_one_device(tmp_path: Path) -> None:
    """A device that takes the name of another, which is gone when the server resumes, keeps its own number."""
    quick = "fleet.deadline_seconds=0.2", "fleet.wait_seconds=0.2"
    chosen = fleet_config("fedhen", "plain", "devices.active=6", "rounds=2", *quick)
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    for device in range(6):
        inside.nodes[1000 - 7 * device].config["name"] = f"device {device}"
    here = play_grid(inside, replace(chosen, rounds=1), tmp_path / "fleet")
    del inside.nodes[1000]
    inside.nodes[993].config["name"] = "device 0"
    with pytest.raises(FedhenError, match="5 of 6 devices"):
        play_grid(inside, chosen, here, resume=True)


def test_a_node_of_another_tier_does_not_count(tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "plain", "fleet.wait_seconds=0.2")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    inside.nodes[1000].config["tier"] = "Simple"
    with pytest.raises(FedhenError, match=r"5 of 6 devices have connected .*others are of tier Simple"):
        play_grid(inside, chosen, tmp_path / "fleet")


def test_a_fleet_finishes_if_a_third_vanishes_in_each_round(tmp_path: Path) -> None:
    """Different ones in each round. The result is that of a simulation without them, including SCAFFOLD's memories."""
    chosen = fleet_config("fedhen", "scaffold", "devices.active=6", "fleet.deadline_seconds=0.2", "rounds=4")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    for device in range(6):
        node = inside.nodes[1000 - 7 * device]
        node.silent = lambda group, device=device: bool(group) and (int(group) + device) % 3 == 0  # type: ignore[misc]
    here = play_grid(inside, chosen, tmp_path / "fleet")
    answering = simulate_with_only(lambda t: [d for d in range(6) if (t + d) % 3], chosen, tmp_path / "simulated")
    assert [len(record.late) for record in read_run(here).rounds] == [2] * 4
    assert read_run(here).summary.late == 8  # type: ignore[union-attr]
    assert same_models(here, answering)


def test_extra_devices_are_asked(tmp_path: Path) -> None:
    """Four are needed and six are asked: the server does not wait for two that do not answer."""
    chosen = fleet_config("fedhen", "plain", "fleet.spare_devices=2", "fleet.deadline_seconds=600", "rounds=1")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    for device in (1, 5):
        inside.nodes[1000 - 7 * device].silent = lambda group: bool(group)
    (record,) = read_run(play_grid(inside, chosen, tmp_path / "fleet")).rounds
    assert record.active == [*range(6)] and record.late == [1, 5]


def test_enough_answers_end_a_round(tmp_path: Path) -> None:
    """Long before the deadline. All that have answered by then count."""
    chosen = fleet_config(
        "fedhen", "plain", "fleet.answers=3", "fleet.deadline_seconds=600", "devices.active=6", "rounds=1"
    )
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    for device in (1, 5):
        inside.nodes[1000 - 7 * device].silent = lambda group: bool(group)
    (record,) = read_run(play_grid(inside, chosen, tmp_path / "fleet")).rounds
    assert record.late == [1, 5] and not record.failed


def test_a_device_that_is_not_connected_is_replaced(tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "plain", "rounds=3")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    steps = play(inside, recipe_app(), fleet_run(chosen, tmp_path / "fleet"))
    next(steps)
    gone = [inside.nodes.pop(1000 - 7 * device) for device in (0, 3)]
    rest = [step.record for step in steps]
    assert len(gone) == 2 and all(record["active"] == [1, 2, 4, 5] for record in rest)


def test_a_run_ends_after_three_rounds_without_an_answer(tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "plain", "rounds=9", "fleet.deadline_seconds=0.05")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    for node in inside.nodes.values():
        node.silent = lambda group: bool(group)
    with pytest.raises(FedhenError, match="had not answered"):
        play_grid(inside, chosen, tmp_path / "fleet")


OPTIMISERS = [
    *("training.optimizer=adamw", "training.lr=0.01", "training.optimizer_state=device"),
    *("server.optimizer=adam", "server.lr=0.1"),
]


@pytest.mark.parametrize(
    ("local", "more"),
    [("scaffold", []), ("feddyn", []), ("plain", []), ("feddyn", OPTIMISERS), ("fedprox", ["wire.up=topk"])],
    ids=str,
)
def test_nodes_return_to_the_round_of_a_restored_server(local: str, more: list[str], tmp_path: Path) -> None:
    """The nodes have trained round 3, but the server resumes after round 2. The nodes have new ids."""
    chosen = fleet_config("fedhen", local, "rounds=5", "devices.active=6", *more)
    inside, run = grid(assign_tiers(chosen), tmp_path / "nodes"), tmp_path / "fleet"
    steps = play(inside, recipe_app(), fleet_run(chosen, run))
    for _ in range(3):
        next(steps)
    steps.close()
    for path in (run / checkpoint_files.FOLDER).glob("round-000003.*"):
        path.unlink()
    back = InsideGrid({5000 + 11 * number: node for number, node in enumerate(inside.nodes.values())})
    play_grid(back, chosen, run, resume=True)
    there = simulate(chosen, tmp_path / "simulated")
    assert (run / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    assert same_models(run, there)
    kept = sorted(path.name for path in (tmp_path / "nodes" / "0").rglob("*.safetensors"))
    assert kept == ([] if local == "plain" else ["round-000004.safetensors", "round-000005.safetensors"])


def test_the_records_are_read_once_by_each_server_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SCAFFOLD with a device that diverges in round 2: its memory of round 1 is used in round 3, as in the records."""
    chosen = fleet_config("fedhen", "scaffold", "rounds=5", "devices.active=6", "evaluation.every=1")
    inside, run = grid(assign_tiers(chosen), tmp_path / "nodes"), tmp_path / "fleet"
    inside.nodes[1000].app = spoiling(lambda content: nan(content) if next(trained) == 2 else content)
    trained, reads = itertools.count(1), list[int]()
    read = server.read_merged_rounds
    monkeypatch.setattr(server, "read_merged_rounds", lambda *given: reads.append(given[1]) or read(*given))  # type: ignore[func-returns-value]
    play_grid(inside, replace(chosen, rounds=3), run)
    assert reads == [1] and read_run(run).rounds[1].dropped == [0]
    play_grid(inside, chosen, run, resume=True)
    assert reads == [1, 4]
    assert [order.memory for order in inside.orders[1000]] == [0, 1, 1, 3, 4]
    assert [order.memory for order in inside.orders[993]] == [0, 1, 2, 3, 4]


def test_a_device_that_has_lost_its_memory_is_left_out(tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "scaffold", "rounds=2", "devices.active=6")
    steps = play(grid(assign_tiers(chosen), tmp_path / "nodes"), recipe_app(), fleet_run(chosen, tmp_path / "fleet"))
    next(steps)
    (path,) = (tmp_path / "nodes" / "2").rglob("round-*.safetensors")
    path.write_bytes(b"torn")
    with pytest.warns(UserWarning, match="memory after round 1 cannot be read"):
        (record,) = (step.record for step in steps)
    assert record["failed"] == [2]


def test_a_new_node_does_not_replace_a_device(tmp_path: Path) -> None:
    """A node with the name of a connected device is left out: it could be a copy."""
    chosen = fleet_config("fedhen", "plain", "rounds=3", "devices.active=6")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    steps = play(inside, recipe_app(), fleet_run(chosen, tmp_path / "fleet"))
    next(steps)
    name = (tmp_path / "nodes" / "0" / "name").read_text()
    tiers = {"tier": "simple", "device": 0}
    inside.nodes[1] = InsideNode({**tiers, "name": name, "state": str(tmp_path / "x")}, client_app(recipe_app()))
    inside.log.clear()
    with pytest.warns(UserWarning, match="called .* like another node"):
        list(steps)
    assert ("train", 1) not in inside.log and [entry for entry in inside.log if entry[1] == 1] == [("query", 1)]
    assert same_models(tmp_path / "fleet", simulate(chosen, tmp_path / "simulated"))
