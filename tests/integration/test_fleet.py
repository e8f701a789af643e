"""A fleet inside one process produces the same bytes as the simulator."""

from __future__ import annotations

import io
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.cli.build import build_fab_from_disk
from flwr.clientapp import ClientApp
from safetensors.torch import load, load_file

import fedhen
from fedhen.algorithm.methods import METHODS
from fedhen.cli.options import LOCALS
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.devices.population import assign_tiers
from fedhen.errors import FedhenError
from fedhen.experiment.finish import finish_run
from fedhen.fleet.app import recipe_app
from fedhen.fleet.new_project import create_project
from fedhen.fleet.node_file import enrol
from fedhen.fleet.project import FleetProject
from fedhen.fleet.server import play
from fedhen.fleet.wire_format import content_of
from fedhen.params import count_bytes
from fedhen.runs.reader import read_run
from fedhen.runs.records import Subject
from support.fleets import fleet_config, fleet_run, play_fleet, same_models, simulate
from support.inside import grid
from support.stopped_runs import wait_for_writer

pytestmark = pytest.mark.fleet


def test_what_flower_ships_contains_no_secret(tmp_path: Path) -> None:
    """Only the files of the app: no key, certificate, data or earlier run."""
    folder = FleetProject(tmp_path / "fleet", "127.0.0.1:8001", public="127.0.0.1:8000")
    create_project(folder, load_recipe("digits"), {"simple": 1, "complex": 1})
    enrol(folder.path, "ward", "simple", folder.path / "nodes" / "ward.toml")
    (folder.path / "runs").mkdir()
    (folder.path / "runs" / "summary.json").write_text("{}")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(folder.path))) as bundle:
        names = {name for name in bundle.namelist() if not name.startswith(".info")}
    assert names == {"pyproject.toml", *(f"fleet_app/{name}.py" for name in ("__init__", "apps", "data"))}
    for secret in ("nodes/ward.toml", "certificates/server.key", "certificates/local/server.key"):
        assert (folder.path / secret).stat().st_mode & 0o777 == 0o600


def test_a_new_fleet_is_an_experiment_of_its_own(tmp_path: Path) -> None:
    """Its data is what the app reads, and no longer the recipe's, of which each node got a share to start with."""
    project = FleetProject(tmp_path / "my fleet", "127.0.0.1:8001", public="127.0.0.1:8000")
    create_project(project, load_recipe("digits"), {"simple": 1, "complex": 1})
    config = toml.read_toml(tmp_path / "my fleet" / "config.toml")
    assert (config.recipe, config.data.name, config.data.limit, config.targets) == ("my-fleet", "python", 0, {})
    assert len(np.load(tmp_path / "my fleet" / "data" / "simple-1.npz")["y"]) == 700


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_local_variant_gives_the_simulators_bytes(method: str, local: str, tmp_path: Path) -> None:
    chosen = fleet_config(method, local)
    there, here = simulate(chosen, tmp_path / "simulated"), play_fleet(chosen, tmp_path / "fleet", tmp_path / "nodes")
    assert (here / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    assert (here / "config.toml").read_text() == (there / "config.toml").read_text()
    # The server of a fleet has no training data to make a checksum of.
    assert read_run(there).subject.data_digest and read_run(here).subject == Subject("classification")
    models = sorted(path.name for path in (there / "models").iterdir())
    assert models == sorted(path.name for path in (here / "models").iterdir())
    for name in models:
        assert (here / "models" / name).read_bytes() == (there / "models" / name).read_bytes(), name


KEPT = {
    "momentum": ["training.momentum=0.9", "server.optimizer=momentum"],
    "adam": ["training.optimizer=adam", "training.lr=0.01", "server.optimizer=yogi", "server.lr=0.1"],
    "adamw": ["training.optimizer=adamw", "training.lr=0.01", "server.optimizer=adagrad", "server.lr=0.1"],
}


@pytest.mark.parametrize("local", ["plain", "feddyn"])
@pytest.mark.parametrize("optimisers", KEPT)
def test_optimisers_whose_state_stays_on_the_nodes_give_the_simulators_bytes(
    optimisers: str, local: str, tmp_path: Path
) -> None:
    """What a node sends is as large as without: the moments are in its folder, and nowhere else."""
    chosen = fleet_config("fedhen", local, "training.optimizer_state=device", *KEPT[optimisers])
    there, here = simulate(chosen, tmp_path / "simulated"), play_fleet(chosen, tmp_path / "fleet", tmp_path / "nodes")
    assert (here / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    assert same_models(here, there)
    files = sorted((tmp_path / "nodes").rglob("round-*.safetensors"))
    kinds = {key.partition("/")[0] for key in load_file(files[-1]) if "/" in key}
    assert kinds == ({"momentum"} if optimisers == "momentum" else {"mean", "square", "steps"})


CODECS = {
    "bf16": ["wire.down=bf16", "wire.up=bf16"],
    "int8": ["wire.down=bf16", "wire.up=int8"],
    "topk": ["wire.up=topk", "wire.keep=0.2"],
    "topk, adam": ["wire.up=topk", "training.optimizer=adam", "training.lr=0.01", "training.optimizer_state=device"],
    "width": ["wire.up=topk", "wire.down=bf16", "model.nesting=width", "model.rates={simple=0.5, complex=1.0}"],
    "down": ["wire.down=bf16"],
}


@pytest.mark.parametrize("codec", CODECS)
def test_coded_updates_give_the_simulators_bytes(codec: str, tmp_path: Path) -> None:
    """Nodes send the encoded tensors, and keep what top-k has not sent in their folders."""
    chosen = fleet_config("fedhen", "plain", "rounds=4", *CODECS[codec])
    there, here = simulate(chosen, tmp_path / "simulated"), play_fleet(chosen, tmp_path / "fleet", tmp_path / "nodes")
    assert (here / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    assert same_models(here, there)
    kept = {key.partition("/")[0] for path in (tmp_path / "nodes").rglob("round-*") for key in load_file(path)}
    assert ("residual" in kept) == ("wire.up=topk" in CODECS[codec])


@pytest.mark.parametrize("up", ["fp32", "bf16", "int8", "topk"])
def test_recorded_bytes_are_those_of_the_tensors_on_the_wire(up: str, tmp_path: Path) -> None:
    """Without the names, shapes and types before them, which the safetensors format writes as a header."""
    chosen = fleet_config("fedhen", "plain", "rounds=1", "devices.active=6", f"wire.up={up}", "wire.down=bf16")
    inside, sent = grid(assign_tiers(chosen), tmp_path / "nodes"), {"down": 0, "up": 0}
    for node in inside.nodes.values():
        node.app = counting(node.app, sent)
    (step,) = play(inside, recipe_app(), fleet_run(chosen, tmp_path / "fleet"))
    assert {way: sum(tiers.values()) for way, tiers in step.record["bytes"].items()} == sent


def counting(app: ClientApp, sent: dict[str, int]) -> ClientApp:
    """Returns an app that adds up the bytes of the tensors that a node receives and sends."""
    outer = ClientApp()
    outer.query()(lambda message, context: app(message, context))

    @outer.train()
    def train(message: Message, context: Context) -> Message:
        reply = app(message, context)
        for way, content in (("down", message.content), ("up", reply.content)):
            sent[way] += count_bytes(load(content_of(content["model"])))
        return reply

    return outer


def test_models_of_a_fleets_run_that_is_not_finished_are_the_simulators(tmp_path: Path) -> None:
    """Read from the server's folder while the run waits after its second round; it is finished by hand, too."""
    chosen = fleet_config("fedhen", "plain", "evaluation.every=1")
    short = fleet_config("fedhen", "plain", "evaluation.every=1", "rounds=2")
    there, here = simulate(short, tmp_path / "simulated"), tmp_path / "fleet"
    nodes = grid(assign_tiers(chosen), tmp_path / "nodes")
    with closing(play(nodes, recipe_app(), fleet_run(chosen, here))) as playing:
        next(playing), next(playing)
        wait_for_writer()
        for of in ("server", "devices"):
            for tier in ("simple", "complex"):
                with pytest.warns(UserWarning, match="fleet is not finished: its models are of round 2 of 3"):
                    found = fedhen.load(here, tier, of).state_dict()
                expected = load_file(there / "models" / f"{of}-{tier}.safetensors")
                assert all(bool((found[name] == tensor).all()) for name, tensor in expected.items())
    assert (here / "fleet.json").is_file() and finish_run(here)
    assert same_models(there, here) and read_run(here).stopped == "finished by hand"


def test_a_fleets_server_cannot_hold_out_training_examples(tmp_path: Path) -> None:
    chosen = fleet_config("fedhen", "plain", "evaluation.validation=0.1")
    with pytest.raises(FedhenError, match=r"evaluation.validation needs training data, which the server"):
        play_fleet(chosen, tmp_path / "fleet", tmp_path / "nodes")
    assert not (tmp_path / "fleet").exists()
