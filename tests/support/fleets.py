"""Small runs on a fleet inside one process and in the simulator, to be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedhen.algorithm.methods import METHODS
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.devices.population import assign_tiers
from fedhen.experiment.build import build_experiment
from fedhen.experiment.choices import take_method
from fedhen.experiment.runner import play_run
from fedhen.fleet.app import recipe_app
from fedhen.fleet.server import FleetRun, play
from support.inside import InsideGrid, grid
from support.tiny import TINY

SMALL = [
    *(*TINY, "data.limit=60", "devices.number=6", "devices.active=4", "rounds=3"),
    *("training.batch_size=5", "evaluation.every=3", "checkpoint.rounds=1"),
    "runtime.engine=plain",
]


def fleet_config(method: str = "fedhen", local: str = "plain", *changes: str) -> Config:
    settings = [*SMALL, f"local.name={local}", *changes]
    return METHODS[method].keep_tiers(toml.apply_settings(take_method(load_recipe("digits"), method), settings))


def simulate(chosen: Config, folder: Path) -> Path:
    folder.mkdir()
    for _ in play_run(folder, build_experiment(chosen, accelerator="cpu")):
        pass
    return folder


def play_fleet(chosen: Config, folder: Path, state: Path) -> Path:
    for _ in play(grid(assign_tiers(chosen), state), recipe_app(), FleetRun(chosen, folder, poll=0.0)):
        pass
    return folder


def play_grid(inside: InsideGrid, chosen: Config, folder: Path, resume: bool = False) -> Path:
    for _ in play(inside, recipe_app(), FleetRun(chosen, folder, resume, poll=0.01)):
        pass
    return folder


def simulate_with_only(active: Callable[[int], Sequence[int]], chosen: Config, folder: Path) -> Path:
    """Simulates a run in which only these devices are active."""
    folder.mkdir()
    for _ in play_run(
        folder, build_experiment(chosen, accelerator="cpu", activate=lambda number, _: [*active(number)])
    ):
        pass
    return folder


def same_models(one: Path, other: Path) -> bool:
    names = [path.name for path in (one / "models").iterdir()]
    return all((one / "models" / n).read_bytes() == (other / "models" / n).read_bytes() for n in names)
