"""What the operator of a fleet sees and does, on a fleet inside one process: causes, versions, the page, deliveries."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedhen.cli import main
from fedhen.config import toml
from fedhen.devices.population import assign_tiers
from fedhen.errors import FedhenError
from fedhen.fleet import delivery, run_lines, wire_format
from fedhen.fleet.app import App, recipe_app
from fedhen.fleet.apps import client_app
from fedhen.fleet.board import read_board
from fedhen.fleet.live_page import LivePage
from fedhen.fleet.processes import free_port
from fedhen.fleet.server import play
from fedhen.fleet.status_table import to_text
from fedhen.fleet.wire_format import Malformed
from support.fleets import fleet_config, fleet_run, play_grid
from support.inside import InsideGrid, grid
from support.pages import Checker
from support.watched import Watched, no_data, served

pytestmark = pytest.mark.fleet


def other_protocol(format: int) -> ClientApp:
    """A node of another version, which answers every question as its own protocol has it."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        versions = ConfigRecord({"format": format, "fedhen": "9.9", "torch": "1.0"})
        return Message(RecordDict({"node": ConfigRecord({"format": format}), "versions": versions}), reply_to=message)

    return app


def test_nodes_that_cannot_introduce_themselves_are_shown_with_the_cause(tmp_path: Path) -> None:
    """One without data and one of another protocol: the others are waited for, and the error names both causes."""
    chosen = fleet_config("fedhen", "plain", "fleet.wait_seconds=0.2")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    inside.nodes[1000].app = client_app(App(no_data))
    inside.nodes[993].app = other_protocol(wire_format.FORMAT + 1)
    with (
        pytest.warns(UserWarning, match=r"node (993|1000) has not identified itself: (it speaks protocol|FileNot)"),
        pytest.raises(FedhenError, match=r"4 of 6 devices .*node 993: .*protocol.*; node 1000: FileNotFoundError"),
    ):
        play_grid(inside, chosen, tmp_path / "fleet")
    board = read_board(tmp_path / "fleet")
    assert board is not None and (board.waiting, board.found) == ("waiting: 4 of 6 nodes", 4)
    nodes = {int(node.node): node for node in board.nodes}
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/data/ward-3.npz'" in nodes[1000].problem
    assert (nodes[993].fedhen, nodes[993].torch) == ("9.9", "1.0")
    assert all(node.online and bool(node.problem) == (int(node.node) in (1000, 993)) for node in board.nodes)
    lines = run_lines.tell_board(board)
    assert lines[0].startswith("waiting: 4 of 6 nodes (") and len(lines) == 3
    assert any("cannot take part: FileNotFoundError" in line for line in lines)


def test_a_node_that_finds_its_data_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again until it can answer, without being restarted."""
    from fedhen.fleet import membership

    monkeypatch.setattr(membership, "RETRY_SECONDS", 0.0)
    chosen = fleet_config("fedhen", "plain", "fleet.wait_seconds=60", "rounds=1", "devices.active=6")
    inside, asked = grid(assign_tiers(chosen), tmp_path / "nodes"), []
    app = recipe_app()

    def late_data(node: Any, config: Any) -> Any:
        asked.append(node)
        return no_data(node, config) if len(asked) < 3 else app.training_data(node, config)

    inside.nodes[1000].app = client_app(replace(app, training_data=late_data))
    with pytest.warns(UserWarning, match="node 1000 has not identified itself: FileNotFoundError"):
        play_grid(inside, chosen, tmp_path / "fleet")
    board = read_board(tmp_path / "fleet")
    assert board is not None and not any(node.problem for node in board.nodes) and len(board.nodes) == 6


def test_the_status_follows_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Before it, after a round in which one failed and one left, and after its end."""
    watched = Watched(tmp_path, monkeypatch)
    before = watched.find()
    assert [node.name for node in before.nodes] == [f"ward-{device}" for device in range(6)] and before.online == 6
    assert before.phase == "no server has played it yet"
    failing = client_app(App(no_data))
    with closing(play(watched.inside, recipe_app(), fleet_run(watched.chosen, watched.run))) as steps:
        next(steps)
        watched.inside.nodes[1000 - 7 * 4].app = failing
        with pytest.warns(UserWarning, match="a device failed"):
            next(steps)
        gone = watched.inside.nodes.pop(1000 - 7 * 2)
        during = {node.name: node for node in watched.find().nodes}
        assert (during["ward-4"].failed, during["ward-4"].last_round) == (1, 1)
        assert "FileNotFoundError" in during["ward-4"].problem
        assert (during["ward-2"].state, during["ward-0"].last_round, during["ward-0"].state) == ("offline", 2, "online")
        assert during["ward-0"].examples == 10 and during["ward-0"].fedhen and during["ward-0"].torch
        lines = run_lines.tell_round(
            watched.run, json.loads((watched.run / "rounds.jsonl").read_text().splitlines()[1])
        )
        assert lines.startswith("round 2: failed: ward-4 (FileNotFoundError")
        watched.inside.nodes[1000 - 7 * 2] = gone
        list(steps)
    after = watched.find()
    assert (after.phase, after.round, after.rounds, after.online) == ("finished", 3, 3, 6)
    assert "6 of 6 nodes are online" in to_text(after) and "ward-4" in to_text(after)
    assert main(["fleet", "status", str(watched.project.path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["phase"] == "finished" and {node["name"] for node in printed["nodes"]} == set(during)


def get(url: str, **headers: str) -> tuple[int, str, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:
            return response.status, response.read().decode(), response.headers
    except urllib.error.HTTPError as error:
        return error.code, "", error.headers


def test_the_page_shows_the_fleet_and_refers_to_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, monkeypatch)
    with served(LivePage(watched.project), f"127.0.0.1:{free_port()}") as server:
        code, text, headers = get(server.url)
        assert code == 200 and headers["Cache-Control"] == "no-store"
        empty = Checker(text)
        assert not empty.links and "ward-3" in empty.text
        play_grid(watched.inside, watched.chosen, watched.run)
        server.page.rendered = (-9.0, "")
        full = Checker(get(server.url)[1])
        assert not full.links and full.tags["figure"] == 2 and "Sent to nodes" in full.text
        assert [row[0] for row in full.cells if row and row[0] in ("1", "2", "3")][:3] == ["3", "2", "1"]
        (policy,) = (a["content"] for t, a in full.elements if a.get("http-equiv") == "Content-Security-Policy")
        assert "default-src 'none'" in policy and policy.endswith("connect-src 'self'")
        # A web site that resolves its name to this machine does not get the page.
        assert get(server.url, Host="evil.example")[0] == 404
        assert get(f"{server.url}other")[0] == 404


def test_a_page_for_other_machines_needs_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(tmp_path, monkeypatch)
    with served(LivePage(watched.project), f"0.0.0.0:{free_port()}") as server:
        address = server.url.replace("0.0.0.0", "127.0.0.1")
        assert len(server.token) >= 32 and get(address)[0] == 200
        assert get(address.replace(server.token, "x" * len(server.token)))[0] == 404
        assert get(address.partition(server.token)[0])[0] == 404


def finished_run(tmp_path: Path) -> tuple[InsideGrid, Path]:
    chosen = fleet_config("fedhen", "plain", "rounds=1")
    inside = grid(assign_tiers(chosen), tmp_path / "nodes")
    run = play_grid(inside, chosen, tmp_path / "run")
    delivery.prepare_safetensors(run, run / delivery.DELIVERY, list(chosen.tiers))
    return inside, run


def deliver(inside: InsideGrid, run: Path) -> list[delivery.Delivered]:
    config = (run / "config.toml").read_text()
    return delivery.deliver(inside, toml.to_toml(toml.parse_toml(config)), run, 12, poll=0.01)


def test_every_node_gets_the_model_of_its_tier_and_keeps_the_last_two(tmp_path: Path) -> None:
    inside, run = finished_run(tmp_path)
    inside.nodes[1000].app = client_app(App(no_data))
    with pytest.warns(UserWarning, match="node 1000 has not identified itself"):
        found = {int(each.node): each for each in deliver(inside, run)}
    assert "FileNotFoundError" in found.pop(1000).error and delivery.read_delivered(run, "12")
    inside.nodes[1000].app = client_app(recipe_app())
    assert all(each.digest and not each.error for each in found.values()) and len(found) == 5
    for node, each in found.items():
        state = Path(inside.nodes[node].config["state"])
        (model,) = (state / "models" / "current").iterdir()
        assert model.read_bytes() == (run / "models" / f"server-{each.tier}.safetensors").read_bytes()
    state = Path(inside.nodes[993].config["state"]) / "models"
    first = (state / "current").resolve()
    for number in range(2):
        for path in (run / delivery.DELIVERY).glob("*/*"):
            path.write_bytes(path.read_bytes() + bytes([number]))
        deliver(inside, run)
    kept = [path for path in state.iterdir() if path.is_dir() and not path.is_symlink()]
    assert len(kept) == 2 and first not in kept and (state / "current").resolve() in kept


@pytest.mark.parametrize(
    ("name", "change", "wrong"),
    [
        ("model.onnx", lambda about: about.__setitem__("digest", "0" * 64), "do not have the SHA-256"),
        ("../model.onnx", lambda about: None, "a file that is no model"),
        ("model.py", lambda about: None, "a file that is no model"),
        ("model.onnx", lambda about: about.__setitem__("names", ["model.onnx", "b.onnx"]), "other files than it names"),
    ],
)
def test_a_node_stores_no_delivery_that_does_not_fit(name: str, change: Any, wrong: str, tmp_path: Path) -> None:
    content = delivery.pack_files({name: b"weights"})
    change(content[delivery.ACTION])
    with pytest.raises(Malformed, match=wrong):
        delivery.unpack_files(content)
    assert "failure" in delivery.accept(content, tmp_path / "state") and not (tmp_path / "state").exists()
