"""Nodes that lie, vanish, come back and are late: the server goes on, with what a simulation without them has."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from fedhen.cli.options import LOCALS
from fedhen.config.settings import Config
from fedhen.devices.population import assign_tiers
from fedhen.errors import UserError
from fedhen.experiment import checkpoint_files
from fedhen.fleet import protocol
from fedhen.fleet.app import App, recipe_app
from fedhen.fleet.apps import client_app
from fedhen.fleet.client_state import ClientState
from fedhen.fleet.protocol import Malformed
from fedhen.fleet.server import Job, play
from fedhen.runs.reader import read_run
from support.fleets import config, fleet, same_models, simulated, with_only
from support.inside import InsideGrid, InsideNode, grid
from support.spoiling import (
    Spoil,
    another_record,
    claims_to_be_enormous,
    enormous,
    extra_name,
    garbage,
    missing_name,
    nan,
    new_record,
    no_loss,
    nothing,
    other_classes,
    raised,
    spoiling,
    steering,
    two_arrays,
    wrong_shape,
    wrong_type,
)

pytestmark = pytest.mark.fleet


def played(inside: InsideGrid, chosen: Config, folder: Path, resume: bool = False) -> Path:
    for _ in play(inside, recipe_app(), Job(chosen, folder, resume, poll=0.01)):
        pass
    return folder


SPOILED: list[tuple[Spoil, str]] = [
    (wrong_shape, "has shape"),
    (wrong_type, "another type"),
    (extra_name, "not one that was sent"),
    (missing_name, "is missing"),
    (enormous, "its weights are"),
    (claims_to_be_enormous, "cannot be read"),
    (garbage, "cannot be read"),
    (another_record, "no weights"),
    (two_arrays, "no weights"),
    (nothing, "is missing"),
    (new_record, "is new"),
    (no_loss, "loss"),
    (other_classes, "classes that there are not"),
    (steering, "?[2J"),
    (raised, "ValueError"),
]


@pytest.mark.parametrize(("spoil", "told"), SPOILED, ids=lambda value: getattr(value, "__name__", ""))
def test_an_answer_that_is_none_is_left_out(spoil: Spoil, told: str, tmp_path: Path) -> None:
    """The server has what a simulation without that device has; the reason is in errors.jsonl."""
    chosen = config("fedhen", "plain", "rounds=1", "devices.active=6", "evaluation.devices=false")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    inside.nodes[1000 - 7 * 4].app = spoiling(spoil)
    with pytest.warns(UserWarning, match="a device failed"):
        here = played(inside, chosen, tmp_path / "fleet")
    there = with_only(lambda _: [0, 1, 2, 3, 5], chosen, tmp_path / "simulated")
    (record,) = read_run(here).rounds
    assert record["failed"] == [4] and record["active"] == [*range(6)] and record["dropped"] == []
    (error,) = (json.loads(line) for line in (here / "errors.jsonl").read_text().splitlines())
    assert told in error["error"] and error["error"].isprintable() and len(error["error"]) <= 300
    assert same_models(here, there)


def test_nan_is_dropped(tmp_path: Path) -> None:
    chosen = config("fedhen", "plain", "rounds=1", "devices.active=6", "evaluation.devices=false")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    inside.nodes[1000 - 7 * 4].app = spoiling(nan)
    here = played(inside, chosen, tmp_path / "fleet")
    assert read_run(here).rounds[0]["dropped"] == [4]
    assert same_models(here, with_only(lambda _: [0, 1, 2, 3, 5], chosen, tmp_path / "simulated"))


@pytest.mark.parametrize("local", LOCALS)
def test_devices_that_diverge_are_dropped_as_in_a_simulation(local: str, tmp_path: Path) -> None:
    chosen = config("fedhen", local, "rounds=2", "training.lr=1e30", "training.clip=1e30")
    here, there = fleet(chosen, tmp_path / "fleet", tmp_path / "nodes"), simulated(chosen, tmp_path / "simulated")
    assert read_run(here).rounds[0]["dropped"]
    assert (here / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()


def test_an_answer_that_is_dropped_does_not_end_the_round(tmp_path: Path) -> None:
    """Device 0 answers first, with NaN; one answer is enough, and it must be one that counts."""

    class First(InsideGrid):
        looks: ClassVar[Counter[str]] = Counter()

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            numbers = list(message_ids)
            self.looks.update(numbers)
            mine = {number for number in numbers if self.replies[number].metadata.src_node_id == 1000}
            return super().pull_messages([n for n in numbers if n in mine or self.looks[n] > 2])

    chosen = config("fedhen", "plain", "rounds=1", "devices.active=6", "fleet.enough=1")
    inside = First(grid(assign_tiers(chosen), tmp_path / "nodes").nodes)
    inside.nodes[1000].app = spoiling(nan)
    (record,) = read_run(played(inside, chosen, tmp_path / "fleet")).rounds
    assert record["dropped"] == [0] and record["loss"] is not None and "late" not in record


def test_an_order_that_was_long_under_way_costs_no_later_memory(tmp_path: Path) -> None:
    """Round 2's is carried out after round 3's."""
    files, memory = ClientState(tmp_path, "run"), {"w": torch.ones(2)}
    for number, before in ((1, 0), (3, 1), (2, 1)):
        files.write(number, {"w": memory["w"] * number}, before)
    assert torch.equal(files.read(3, memory)["w"], torch.tensor([3.0, 3.0]))


def test_one_node_is_one_device(tmp_path: Path) -> None:
    """A device that claims the name of another, which is gone when the server comes back, stays what it was."""
    chosen = config("fedhen", "plain", "devices.active=6", "rounds=2", "fleet.deadline=0.2", "fleet.wait=0.2")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    for device in range(6):
        inside.nodes[1000 - 7 * device].config["name"] = f"device {device}"
    here = played(inside, replace(chosen, rounds=1), tmp_path / "fleet")
    del inside.nodes[1000]
    inside.nodes[993].config["name"] = "device 0"
    with pytest.raises(UserError, match="5 of 6 devices"):
        played(inside, chosen, here, resume=True)


def test_a_node_of_another_tier_is_not_waited_with(tmp_path: Path) -> None:
    chosen = config("fedhen", "plain", "fleet.wait=0.2")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    inside.nodes[1000].config["tier"] = "Simple"
    with pytest.raises(UserError, match=r"5 of 6 devices have connected .*others are of tier Simple"):
        played(inside, chosen, tmp_path / "fleet")


def test_a_fleet_of_which_a_third_vanishes_each_round_finishes(tmp_path: Path) -> None:
    """Each round other ones: the server has what a simulation of the others has, SCAFFOLD's memories included."""
    chosen = config("fedhen", "scaffold", "devices.active=6", "fleet.deadline=0.2", "rounds=4")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    for device in range(6):
        node = inside.nodes[1000 - 7 * device]
        node.silent = lambda group, device=device: bool(group) and (int(group) + device) % 3 == 0  # type: ignore[misc]
    here = played(inside, chosen, tmp_path / "fleet")
    answering = with_only(lambda t: [d for d in range(6) if (t + d) % 3], chosen, tmp_path / "simulated")
    assert [len(record["late"]) for record in read_run(here).rounds] == [2] * 4
    assert read_run(here).summary["late"] == 8  # type: ignore[index]
    assert same_models(here, answering)


def test_more_are_asked_than_are_needed(tmp_path: Path) -> None:
    """Four are wanted and two more are asked: two that do not answer are not waited for."""
    chosen = config("fedhen", "plain", "fleet.extra=2", "fleet.deadline=600", "rounds=1")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    for device in (1, 5):
        inside.nodes[1000 - 7 * device].silent = lambda group: bool(group)
    (record,) = read_run(played(inside, chosen, tmp_path / "fleet")).rounds
    assert record["active"] == [*range(6)] and record["late"] == [1, 5]


def test_enough_answers_end_a_round(tmp_path: Path) -> None:
    """Long before the deadline; those that have answered by then all count."""
    chosen = config("fedhen", "plain", "fleet.enough=3", "fleet.deadline=600", "devices.active=6", "rounds=1")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    for device in (1, 5):
        inside.nodes[1000 - 7 * device].silent = lambda group: bool(group)
    (record,) = read_run(played(inside, chosen, tmp_path / "fleet")).rounds
    assert record["late"] == [1, 5] and "failed" not in record


def test_a_device_that_is_not_connected_has_a_stand_in(tmp_path: Path) -> None:
    chosen = config("fedhen", "plain", "rounds=3")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    steps = play(inside, recipe_app(), Job(chosen, tmp_path / "fleet", poll=0.0))
    next(steps)
    gone = [inside.nodes.pop(1000 - 7 * device) for device in (0, 3)]
    rest = [step.record for step in steps]
    assert len(gone) == 2 and all(record["active"] == [1, 2, 4, 5] for record in rest)


def test_no_one_answers_for_three_rounds(tmp_path: Path) -> None:
    chosen = config("fedhen", "plain", "rounds=9", "fleet.deadline=0.05")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    for node in inside.nodes.values():
        node.silent = lambda group: bool(group)
    with pytest.raises(UserError, match="had not answered"):
        played(inside, chosen, tmp_path / "fleet")


@pytest.mark.parametrize("local", ["scaffold", "feddyn", "plain"])
def test_a_server_that_goes_back_takes_its_nodes_along(local: str, tmp_path: Path) -> None:
    """The nodes have trained round 3, of which the server knows nothing: it goes on after round 2, under new ids."""
    chosen = config("fedhen", local, "rounds=5", "devices.active=6")
    inside, run = grid(assign_tiers(chosen), tmp_path / "nodes"), tmp_path / "fleet"
    steps = play(inside, recipe_app(), Job(chosen, run, poll=0.0))
    for _ in range(3):
        next(steps)
    steps.close()
    for path in (run / checkpoint_files.FOLDER).glob("round-000003.*"):
        path.unlink()
    back = InsideGrid({5000 + 11 * number: node for number, node in enumerate(inside.nodes.values())})
    played(back, chosen, run, resume=True)
    there = simulated(chosen, tmp_path / "simulated")
    assert (run / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    assert same_models(run, there)
    kept = sorted(path.name for path in (tmp_path / "nodes" / "0").rglob("*.safetensors"))
    assert kept == ([] if local == "plain" else ["round-000004.safetensors", "round-000005.safetensors"])


def test_a_device_whose_memory_is_gone_is_left_out(tmp_path: Path) -> None:
    chosen = config("fedhen", "scaffold", "rounds=2", "devices.active=6")
    steps = play(
        grid(assign_tiers(chosen), tmp_path / "nodes"), recipe_app(), Job(chosen, tmp_path / "fleet", poll=0.0)
    )
    next(steps)
    (path,) = (tmp_path / "nodes" / "2").rglob("round-*.safetensors")
    path.write_bytes(b"torn")
    with pytest.warns(UserWarning, match="memory after round 1 cannot be read"):
        (record,) = (step.record for step in steps)
    assert record["failed"] == [2]


def test_a_stranger_takes_nobodys_place(tmp_path: Path) -> None:
    """A node that claims a name while its owner is connected, and one that comes too late, wait for the next run."""
    chosen = config("fedhen", "plain", "rounds=3", "devices.active=6")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    steps = play(inside, recipe_app(), Job(chosen, tmp_path / "fleet", poll=0.0))
    next(steps)
    name = (tmp_path / "nodes" / "0" / "name").read_text()
    tiers = {"tier": "simple", "device": 0}
    inside.nodes[1] = InsideNode({**tiers, "name": name, "state": str(tmp_path / "x")}, client_app(recipe_app()))
    inside.log.clear()
    with pytest.warns(UserWarning, match="waits for the next run"):
        list(steps)
    assert ("train", 1) not in inside.log and [entry for entry in inside.log if entry[1] == 1] == [("query", 1)]
    assert same_models(tmp_path / "fleet", simulated(chosen, tmp_path / "simulated"))


def test_each_node_is_asked_once_who_it_is(tmp_path: Path) -> None:
    chosen = config("fedhen", "plain")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    played(inside, chosen, tmp_path / "fleet")
    assert sorted(node for kind, node in inside.log if kind == "query") == sorted(inside.nodes)


def test_a_server_without_test_data_trains_the_same_models(tmp_path: Path) -> None:
    chosen = config("fedhen", "plain", "evaluation.devices=false")
    blind = replace(recipe_app(), test_data=lambda config: None, inputs=(1, 8, 8), classes=10)
    inside = grid(assign_tiers(chosen), tmp_path / "nodes", blind)
    for _ in play(inside, blind, Job(chosen, tmp_path / "blind", poll=0.0)):
        pass
    assert same_models(tmp_path / "blind", simulated(chosen, tmp_path / "simulated"))
    run = read_run(tmp_path / "blind")
    assert "final" not in run.summary and not any("accuracy" in r for r in run.rounds)  # type: ignore[operator]


def test_an_app_brings_its_own_models_and_data(tmp_path: Path) -> None:
    from support.families import two_exits

    def training_data(node: Any, config: Config) -> tuple[Any, Any]:
        made = torch.Generator().manual_seed(int(node["device"]))
        return torch.randn(20, 6, generator=made), torch.randint(0, 3, (20,), generator=made)

    own = App(training_data, inputs=(6,), classes=3, family=two_exits())
    chosen = config("fedhen", "scaffold", "evaluation.devices=false", "fleet.wait=1")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes", own)
    for _ in play(inside, own, Job(chosen, tmp_path / "own", poll=0.0)):
        pass
    assert len(read_run(tmp_path / "own").rounds) == 3


@pytest.mark.parametrize("local", ["plain", "scaffold", "feddyn"])
def test_the_recorded_bytes_are_those_that_travel(local: str, tmp_path: Path) -> None:
    """But for the names and shapes: FedDyn sends nothing beside its weights, SCAFFOLD as much again as it trains."""
    chosen = config("fedhen", local, "rounds=1", "devices.active=6", "model.widths=[16, 16, 32, 32]")
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
    (record,) = read_run(played(inside, chosen, tmp_path / "fleet")).rounds
    for way in ("down", "up"):
        recorded = sum(record["bytes"][way].values())
        assert recorded <= seen[way] <= 1.1 * recorded


def test_a_fleet_that_does_not_come_together_says_who_is_missing(tmp_path: Path) -> None:
    chosen = config("fedhen", "plain", "fleet.wait=0.1")
    inside = grid(assign_tiers(chosen)[:4], tmp_path / "nodes")
    with pytest.raises(UserError, match="4 of 6 devices have connected"):
        played(inside, chosen, tmp_path / "fleet")
    fleet_of_simple = grid(["simple"] * 6, tmp_path / "others")
    with pytest.raises(UserError, match="no node of tier 'complex'"):
        played(fleet_of_simple, chosen, tmp_path / "second")


def test_a_simulated_run_is_not_gone_on_with_by_a_fleet_nor_the_other_way_round(tmp_path: Path) -> None:
    chosen = config("fedhen", "plain", "rounds=1")
    there = simulated(chosen, tmp_path / "simulated")
    with pytest.raises(UserError, match="was not played by a fleet"):
        played(grid(assign_tiers(chosen), tmp_path / "n"), replace(chosen, rounds=2), there, resume=True)
    here = fleet(chosen, tmp_path / "fleet", tmp_path / "nodes")
    with pytest.raises(UserError, match="fedhen fleet run --resume"):
        import fedhen

        fedhen.resume(here, rounds=2)


LIKE = {"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.float64), "c": torch.zeros(0, 4)}


def test_weights_travel_as_they_are() -> None:
    sent = {"b": torch.tensor(2.5, dtype=torch.float64), "a": torch.randn(2, 3), "c": torch.zeros(0, 4)}
    back = protocol.unpack(protocol.pack(sent), LIKE)
    assert [*back] == [*LIKE] and all(torch.equal(back[name], sent[name]) for name in LIKE)


@given(st.integers(0, 10**6), st.integers(0, 255), st.integers(0, 40))
def test_bytes_that_were_changed_are_refused_or_have_the_right_shapes(place: int, byte: int, cut: int) -> None:
    data = bytearray(protocol.pack(LIKE)["weights"].data)
    data[place % len(data)] = byte
    data = data[: len(data) - cut]
    record = ArrayRecord({"weights": Array("uint8", (len(data),), "safetensors", bytes(data))})
    try:
        found = protocol.unpack(record, LIKE)
    except Malformed as error:
        assert str(error).isprintable()
        return
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, t.dtype) for n, t in LIKE.items()}
