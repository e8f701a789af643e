"""A fleet inside one process produces the same bytes as the simulator."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from safetensors.torch import load_file

from fedhen.algorithm.methods import METHODS
from fedhen.cli.options import LOCALS
from fedhen.config.recipes import load_recipe
from fedhen.fleet.new_project import create_project
from fedhen.fleet.project import FleetProject
from support.fleets import fleet_config, play_fleet, same_models, simulate

pytestmark = pytest.mark.fleet


def test_what_flower_ships_contains_no_secret(tmp_path: Path) -> None:
    """Only the files of the app: no key, certificate, data or earlier run."""
    folder = FleetProject(tmp_path / "fleet", "127.0.0.1:8000")
    create_project(folder, load_recipe("digits"), {"simple": 1, "complex": 1})
    (folder.path / "runs").mkdir()
    (folder.path / "runs" / "summary.json").write_text("{}")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(folder.path))) as bundle:
        names = {name for name in bundle.namelist() if not name.startswith(".info")}
    assert names == {"pyproject.toml", *(f"fleet_app/{name}.py" for name in ("__init__", "apps", "data"))}
    for secret in ("keys/simple-1", "keys/complex-1", "certificates/server.key"):
        assert (folder.path / secret).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_local_variant_gives_the_simulators_bytes(method: str, local: str, tmp_path: Path) -> None:
    chosen = fleet_config(method, local)
    there, here = simulate(chosen, tmp_path / "simulated"), play_fleet(chosen, tmp_path / "fleet", tmp_path / "nodes")
    assert (here / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    assert (here / "config.toml").read_text() == (there / "config.toml").read_text()
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
