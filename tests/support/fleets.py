"""Small runs on a fleet inside one process and in the simulator, to be compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.serverapp import Grid

from fedhen.algorithm.methods import METHODS, load_method
from fedhen.algorithm.sampling import make_sampler, replace_absent
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.data.storage import data_root
from fedhen.devices.population import Population, assign_tiers
from fedhen.experiment.build import build_experiment, build_population, choose_data, start_experiment
from fedhen.experiment.choices import take_method
from fedhen.experiment.experiment import Experiment
from fedhen.experiment.runner import play_run
from fedhen.fleet.app import App, recipe_app
from fedhen.fleet.server import FleetRun, play
from fedhen.runs.private import write_secret
from support.inside import grid
from support.tiny import TINY

SMALL = [
    *(*TINY, "data.limit=60", "devices.number=6", "devices.active=4", "rounds=3"),
    *("training.batch_size=5", "evaluation.every=3", "checkpoint.rounds=1"),
    *("runtime.engine=plain", "fleet.losses=true"),
]
SECRET = bytes(range(32))
"""Of the fleets here and of the simulations that they are compared with."""


def fleet_config(method: str = "fedhen", local: str = "plain", *changes: str) -> Config:
    settings = [*SMALL, f"local.name={local}", *changes]
    return METHODS[method].keep_tiers(toml.apply_settings(take_method(load_recipe("digits"), method), settings))


def simulate(chosen: Config, folder: Path, secret: bytes = SECRET) -> Path:
    folder.mkdir()
    for _ in play_run(folder, build_experiment(chosen, accelerator="cpu", secret=secret)):
        pass
    return folder


def fleet_run(chosen: Config, folder: Path, resume: bool = False) -> FleetRun:
    return FleetRun(chosen, folder, resume, poll=0.0, secret=SECRET)


def give_secret(run: Path) -> None:
    """Puts the secret into the folder of a run that has not begun."""
    run.mkdir(exist_ok=True)
    write_secret(run, SECRET)


def play_fleet(chosen: Config, folder: Path, state: Path) -> Path:
    return play_grid(grid(assign_tiers(chosen), state), chosen, folder)


def play_grid(inside: Grid, chosen: Config, folder: Path, resume: bool = False) -> Path:
    for _ in play(inside, recipe_app(), replace(fleet_run(chosen, folder, resume), poll=0.01)):
        pass
    return folder


def simulate_with_only(
    active: Callable[[int], Sequence[int]], chosen: Config, folder: Path, secret: bytes = SECRET
) -> Path:
    """Simulates a run in which only these devices are active."""
    folder.mkdir()

    def activate(number: int, losses: Mapping[int, float]) -> list[int]:
        return [*active(number)]

    for _ in play_run(folder, build_experiment(chosen, accelerator="cpu", activate=activate, secret=secret)):
        pass
    return folder


def same_models(one: Path, other: Path) -> bool:
    names = [path.name for path in (one / "models").iterdir()]
    return all((one / "models" / n).read_bytes() == (other / "models" / n).read_bytes() for n in names)


@dataclass
class PlannedRoster:
    """The membership of a fleet, for a simulation of it: who joins and who is away is known beforehand."""

    population: Population
    """With all devices that ever join."""
    joins: Mapping[int, int]
    """Device -> the first round that it can take part in, if that is not the first."""
    away: Mapping[int, Collection[int]]
    """Device -> the rounds in which it is not there."""

    def begin(self, number: int) -> Population:
        devices = [d for d in range(len(self.population.tier_of)) if self.joins.get(d, 1) <= max(number, 1)]
        return self.population.with_devices(
            [self.population.tier_of[d] for d in devices], [self.population.examples[d] for d in devices]
        )

    reopen = begin

    def take(self, population: Population) -> PlannedRoster:
        self.population = replace(self.population, fixed=population.fixed)
        return self

    def draw(self, number: int, losses: Mapping[int, float]) -> list[int]:
        population = self.begin(number)
        root = population.run_streams.root
        drawn = make_sampler(population.config.devices, root, population.tier_of)(number, losses)
        present = [d for d in range(len(population.tier_of)) if number not in self.away.get(d, ())]
        return replace_absent(drawn, present, root, number)


def plan_roster(
    chosen: Config,
    more: Sequence[str],
    joins: Mapping[int, int],
    away: Mapping[int, Collection[int]],
    secret: bytes = SECRET,
) -> PlannedRoster:
    """Builds the roster of a simulation that begins as configured, and that devices of these tiers join later."""
    whole = config_of_everyone(chosen, more)
    data = choose_data(None, chosen.data, data_root(None), chosen.seed)
    population = build_population(whole, load_method(chosen.method), data, secret=secret)
    return PlannedRoster(replace(population, config=chosen), joins, away)


def config_of_everyone(chosen: Config, more: Sequence[str]) -> Config:
    """Returns a configuration in which the devices that join later are there from the beginning."""
    tier_of = [*chosen.tier_of_devices(), *more]
    devices = replace(chosen.devices, number=len(tier_of), tiers=tuple(tier_of))
    shares = {tier: tier_of.count(tier) / len(tier_of) for tier in chosen.tiers}
    return replace(chosen, devices=devices, tiers=shares)


def start_planned(roster: PlannedRoster) -> Experiment:
    return start_experiment(roster.begin(1), activate=roster.draw, roster=roster.take)


def joining_app(chosen: Config, more: Sequence[str]) -> App:
    """Builds the app of a fleet whose nodes deal the data as if all devices were there from the beginning."""
    app, everyone = recipe_app(), config_of_everyone(chosen, more)
    return replace(app, training_data=lambda node, config: app.training_data(node, everyone))
