"""What leaves the server and the nodes of a fleet, byte by byte, and the secret that its random choices follow from."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from torch import Tensor, nn

import fedhen
from fedhen import seeds
from fedhen.algorithm.sampling import make_sampler
from fedhen.cli.main import main
from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.devices.population import assign_tiers
from fedhen.errors import CheckpointError
from fedhen.experiment.build import build_experiment
from fedhen.experiment.resume import ResumePolicy
from fedhen.experiment.runner import play_run
from fedhen.fleet.app import App, recipe_app
from fedhen.fleet.server import FleetRun, play
from support.fleets import SECRET, fleet_config, play_grid, same_models, simulate
from support.inside import InsideGrid, grid

pytestmark = pytest.mark.fleet
SEED = 918_273_645_546_372
QUIET = "fleet.losses=false"


@dataclass
class WatchedGrid(InsideGrid):
    """A grid that keeps every message, in both directions, as records and as bytes."""

    messages: list[tuple[int, Message]] = field(default_factory=list)
    """The node that a message is to or from, and the message."""

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        self.messages += [(message.metadata.dst_node_id, message) for message in messages]
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Any) -> Any:
        found = list(super().pull_messages(message_ids))
        self.messages += [(message.metadata.src_node_id, message) for message in found]
        return found

    def bytes_of(self, node: int | None = None) -> bytes:
        """Returns all that was sent to and from a node, or all nodes."""
        return b"\n".join(
            part.deflate()
            for of, message in self.messages
            if node in (None, of)
            for part in get_all_nested_objects(message).values()
        )

    def fields(self) -> dict[str, set[str]]:
        """Returns record -> the names of its fields, in any message."""
        found: dict[str, set[str]] = {}
        for _, message in self.messages:
            for name, record in message.content.items() if message.has_content() else ():
                if isinstance(record, ConfigRecord):
                    found.setdefault(name, set()).update(record)
        return found


def watch(chosen: Config, state: Path) -> WatchedGrid:
    inside = WatchedGrid(grid(assign_tiers(chosen), state).nodes)
    for node in inside.nodes.values():
        node.config["seed"] = chosen.seed
    return inside


def stored(state: Path) -> bytes:
    """Returns all that nodes have stored."""
    return b"\n".join(path.read_bytes() for path in sorted(state.rglob("*")) if path.is_file())


def spellings(number: int) -> Iterator[bytes]:
    """Yields a number as text and as the bytes that records may hold it in."""
    yield str(number).encode()
    yield f"{number:x}".encode()
    yield struct.pack("<q", number)
    yield struct.pack(">q", number)
    seven = [number >> shift & 0x7F for shift in range(0, number.bit_length(), 7)]
    yield bytes([part | 0x80 for part in seven[:-1]] + seven[-1:])


def spelled(key: bytes) -> tuple[bytes, bytes]:
    return key, key.hex().encode()


@pytest.mark.parametrize("private", [False, True])
def test_what_leaves_a_fleet_and_what_its_nodes_store(private: bool, tmp_path: Path) -> None:
    """No seed, secret, key of another device or round, share of the data, loss or class; nobody who else is active."""
    more = ["privacy.mechanism=central", "privacy.bound=0.5", "privacy.noise=0.5", "evaluation.devices=false"]
    chosen = replace(fleet_config("fedhen", "plain", QUIET, *(more if private else [])), seed=SEED)
    inside, state = watch(chosen, tmp_path / "nodes"), tmp_path / "nodes"
    play_grid(inside, chosen, tmp_path / "fleet")
    assert inside.fields() == {
        "question": {"format", "config"},
        "node": {"format", "tier", "samples", "name", "place"},
        "versions": {"format", "fedhen", "torch"},
        "order": {
            *("format", "run", "round", "tier", "memory", "inputs", "classes", "config_digest", "config_text"),
            *("fixed_digest", "key", "initial_key"),
        },
        "update": {"format"},
    }
    whole, kept = inside.bytes_of(), stored(state)
    assert b'method = "fedhen"' in whole and b'method = "fedhen"' in kept, "the configuration can be read here"
    for secret in [*spellings(SEED), *spelled(SECRET)]:
        assert secret not in whole and secret not in kept
    open_one = replace(chosen, privacy=replace(chosen.privacy, mechanism="none", noise=0.0))
    simulated = build_experiment(open_one, accelerator="cpu", secret=SECRET)
    for _ in simulated.play():
        for loss in simulated.losses.values():
            for spelling in (struct.pack("<d", loss), struct.pack(">d", loss), repr(loss).encode()):
                assert spelling not in whole and spelling not in kept
    assert len(simulated.losses) >= 4
    check_keys(inside, chosen, kept)


def check_keys(inside: WatchedGrid, chosen: Config, kept: bytes) -> None:
    """A node is sent its own keys of the rounds that it is active in, and stores none."""
    streams, draw = seeds.RunStreams(SECRET), make_sampler(chosen.devices, SECRET, assign_tiers(chosen))
    active = {number: draw(number, {}) for number in range(1, chosen.rounds + 1)}
    for device in range(chosen.devices.number):
        seen = inside.bytes_of(1000 - 7 * device)
        for number in range(chosen.rounds + 2):
            for other in range(chosen.devices.number):
                key = streams.key_of_device(number, other)
                is_own = other == device and device in active.get(number, [])
                assert [spelling in seen for spelling in spelled(key)] == [False, is_own], (device, number, other)
                assert not any(spelling in kept for spelling in spelled(key))


NEEDED = {
    "loss": (["devices.sampling=loss"], "update", {"loss"}),
    "classes": (["server.rows_by_class=true"], "update", {"present"}),
    "share": (["local.name=feddyn", "split.kind=dirichlet-by-class", "data.limit=120"], "order", {"omega"}),
    "progress": (["fleet.losses=true"], "update", {"loss"}),
}


@pytest.mark.parametrize("needed", NEEDED)
def test_what_a_setting_needs_is_told(needed: str, tmp_path: Path) -> None:
    changes, record, names = NEEDED[needed]
    chosen = fleet_config("fedhen", "plain", QUIET, "rounds=2", *changes)
    inside = watch(chosen, tmp_path / "nodes")
    here = play_grid(inside, chosen, tmp_path / "fleet")
    told = {"loss", "present", "omega"} & (inside.fields()["update"] | inside.fields()["order"])
    assert told == names and names <= inside.fields()[record]
    assert same_models(here, simulate(chosen, tmp_path / "simulated"))


class Forgetful(nn.Module):
    """A network with dropout, whose second exit is that of the complex tier."""

    features: Tensor

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.body, self.exit, self.drop = nn.Linear(6, 8), nn.Linear(8, 3), nn.Dropout(0.5)
        self.top = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)) if deep else None
        # Neither saved nor sent: a node must draw it as the server does.
        self.register_buffer("features", torch.randn(8, 8), persistent=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.drop(self.body(x).relu())
        return [self.exit(h)] if self.top is None else [self.exit(h), self.top(h @ self.features)]


def examples(device: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(device)
    return torch.randn(20, 6, generator=made), torch.randint(0, 3, (20,), generator=made)


@pytest.mark.parametrize("changes", [("local.name=scaffold",), ("wire.up=int8",)])
def test_a_fleet_is_the_simulation_that_is_given_its_secret(changes: tuple[str, ...], tmp_path: Path) -> None:
    """With dropout and a drawn buffer: the same models, and the same records in all keys but `loss`."""
    family = fedhen.Family({"simple": lambda: Forgetful(False), "complex": lambda: Forgetful(True)})
    chosen = fleet_config("fedhen", "plain", QUIET, "model.family=python", "data.name=python", "data.limit=0", *changes)
    app = App(lambda node, config: examples(int(node["device"])), lambda config: examples(9), classes=3, family=family)
    data = fedhen.per_device([examples(device) for device in range(6)], *examples(9))
    chosen = replace(chosen, split=replace(chosen.split, kind="natural"))
    runs = [FleetRun(chosen, tmp_path / name, poll=0.0) for name in ("one", "two")]
    for run in runs:
        for _ in play(grid(assign_tiers(chosen), tmp_path / f"nodes-{run.folder.name}", app), app, run):
            pass
    there = tmp_path / "simulated"
    there.mkdir()
    found = [bytes.fromhex((run.folder / "private" / "secret").read_text()) for run in runs]
    for _ in play_run(there, build_experiment(chosen, data=data, family=family, accelerator="cpu", secret=found[0])):
        pass
    assert same_models(runs[0].folder, there) and not same_models(runs[1].folder, there)
    records = [[json.loads(line) for line in (f / "rounds.jsonl").open()] for f in (runs[0].folder, there)]
    assert all(each["loss"] is None for each in records[0]) and all(each["loss"] > 0 for each in records[1])
    assert [{**each, "loss": 0} for each in records[0]] == [{**each, "loss": 0} for each in records[1]]
    assert found[0] != found[1], "drawn for each run"


def test_a_resumed_fleet_keeps_its_secret(tmp_path: Path) -> None:
    """Nobody else can read it. Without it the run is not resumed."""
    chosen = fleet_config("fedhen", "plain", "devices.active=3")
    inside, folder = grid(assign_tiers(chosen), tmp_path / "nodes"), tmp_path / "fleet"
    with closing(play(inside, recipe_app(), FleetRun(chosen, folder, poll=0.0))) as rounds:
        next(rounds), next(rounds)
    path = folder / "private" / "secret"
    assert [each.stat().st_mode & 0o777 for each in (path, path.parent)] == [0o600, 0o700]
    text = path.read_text()
    for _ in play(inside, recipe_app(), FleetRun(chosen, folder, resume=True, poll=0.0)):
        pass
    assert path.read_text() == text and len(bytes.fromhex(text)) == 32
    there = simulate(chosen, tmp_path / "simulated", bytes.fromhex(text))
    assert (folder / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    assert same_models(folder, there)
    for damage in (lambda: path.write_text("0" * 63), path.unlink):
        damage()
        with pytest.raises(fedhen.errors.FedhenError, match=r"private/secret (is missing|cannot be read).*restore it"):
            play_grid(inside, replace(chosen, rounds=4), folder, resume=True)


def test_a_simulation_with_a_secret_keeps_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line and from Python: resumed, it goes on with the secret, and refuses another one."""
    (tmp_path / "secret").write_text(SECRET.hex() + "\n")
    settings = ["data.limit=60", "rounds=2", "devices.active=4", "checkpoint.rounds=1"]
    arguments = ["run", "digits", "--method", "fedhen", "--secret", str(tmp_path / "secret")]
    arguments += ["--run-dir", str(tmp_path / "run"), *(f"--set={each}" for each in settings)]
    assert main(arguments) == 0
    assert main(["resume", str(tmp_path / "run"), "--rounds", "3"]) == 0
    fedhen.run(tmp_path / "run" / "config.toml", secret=SECRET, run_dir=tmp_path / "again", progress=False)
    assert same_models(tmp_path / "run", tmp_path / "again")
    fedhen.resume(tmp_path / "again", rounds=4, progress=False)
    assert (tmp_path / "again" / "private" / "secret").read_text() == SECRET.hex() + "\n"
    chosen = toml.read_toml(tmp_path / "again" / "config.toml")
    other = build_experiment(replace(chosen, rounds=5), accelerator="cpu", secret=bytes(32))
    with pytest.raises(CheckpointError, match="has another secret in private/secret than the one that was given"):
        next(iter(play_run(tmp_path / "again", other, ResumePolicy(resume=True))))
    (tmp_path / "secret").write_text("no secret")
    assert main(arguments) == 2
    assert "cannot be read as a secret of 64 hexadecimal digits" in capsys.readouterr().err
    with pytest.raises(fedhen.errors.ConfigError, match="secret must be 32 bytes"):
        fedhen.run("digits", secret=b"short", progress=False)
