"""Bounded updates and attacks in whole runs: in a simulation, and in a fleet inside one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.devices.population import assign_tiers
from fedhen.errors import FleetError
from fedhen.experiment.build import build_experiment
from fedhen.fleet.app import recipe_app
from fedhen.fleet.server import FleetRun, play
from support.fleets import fleet_config, play_fleet, same_models, simulate
from support.inside import grid
from support.tiny import TINY


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def small(*changes: str) -> Config:
    settings = [*TINY, "rounds=3", "evaluation.devices=false", "devices.active=4", "runtime.engine=plain", *changes]
    return toml.apply_settings(load_recipe("digits"), settings)


def norms(config: Config) -> Iterator[float]:
    """Yields by how far each round has moved the complex model."""
    experiment = build_experiment(config, accelerator="cpu")
    before = experiment.server["complex"]
    for _ in experiment.play():
        after = experiment.server["complex"]
        yield sum(float((after[n].double() - before[n].double()).square().sum()) for n in after) ** 0.5
        before = after


@pytest.mark.slow
def test_a_bad_device_moves_the_model_by_at_most_the_bound() -> None:
    """An average of changes that are no longer than S is on each block no longer than S, so √2·S on two blocks."""
    attack = ("attack.kind=shifted", "attack.strength=1e6", "attack.share.complex=0.5")
    assert next(norms(small(*attack))) > 1e5
    assert max(norms(small(*attack, "privacy.mechanism=bounded", "privacy.bound=0.3"))) <= 0.3 * 2**0.5 * 1.0001


@pytest.mark.fleet
def test_a_bounded_fleet_is_the_bounded_simulation(tmp_path: Path) -> None:
    config = fleet_config("fedhen", "plain", "privacy.mechanism=bounded", "privacy.bound=0")
    simulated = simulate(config, tmp_path / "simulated")
    fleet = play_fleet(config, tmp_path / "fleet", tmp_path / "state")
    assert same_models(simulated, fleet)
    assert lines(simulated) == lines(fleet)
    assert all(line["bound"] > 0 for line in lines(fleet))


@pytest.mark.fleet
def test_attacks_are_not_played_in_a_fleet(tmp_path: Path) -> None:
    config = fleet_config("fedhen", "plain", "attack.kind=scaled")
    inside = grid(assign_tiers(config), tmp_path / "state")
    with pytest.raises(FleetError, match="simulations only"):
        next(play(inside, recipe_app(), FleetRun(config, tmp_path / "run", poll=0.0)))
