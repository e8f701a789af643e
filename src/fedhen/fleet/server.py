"""The server of a real fleet: the simulator's experiment and run folder, with nodes as its devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.serverapp import Grid

from fedhen.algorithm.sampling import make_sampler
from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.devices.population import assign_tiers, compute_omega, make_population
from fedhen.engines.engine import Engine, EngineParts
from fedhen.errors import UserError
from fedhen.experiment import build
from fedhen.experiment.experiment import Experiment, Step
from fedhen.experiment.resume import ResumePolicy
from fedhen.experiment.runner import play_run
from fedhen.fleet import membership as rosters
from fedhen.fleet.app import App
from fedhen.fleet.engine import POLL, FleetDevices, make_fleet_sampler
from fedhen.fleet.membership import Membership
from fedhen.fleet.run_settings import ANEW
from fedhen.hardware.accelerator import choose_device
from fedhen.runs.layout import CONFIG, ROUNDS
from fedhen.runs.writer import read_whole_lines


@dataclass(frozen=True)
class Job:
    """A run to be played by a fleet."""

    config: Config
    folder: Path
    resume: bool = False
    flower: int = 0
    """Flower's own number of it."""
    poll: float = POLL


def play(grid: Grid, app: App, job: Job) -> Generator[Step, None, None]:
    """Play the rounds that are left with the nodes that are there; every round is saved."""
    roster, config = reopen_fleet(grid, job) if is_begun(job) else gather_fleet(grid, job)
    experiment = build_fleet_experiment(app, roster, replace(job, config=config))
    yield from play_run(job.folder, experiment, ResumePolicy(resume=job.resume, otherwise=ANEW))


def is_begun(job: Job) -> bool:
    """Whether there is a run to go on with."""
    begun = (job.folder / CONFIG).is_file()
    if begun and not job.resume:
        raise UserError(f"{job.folder} holds a run: go on with --resume {job.folder}, or choose another --out")
    return begun


def gather_fleet(grid: Grid, job: Job) -> tuple[Membership, Config]:
    """The fleet of a new run: the nodes that are connected once there are enough."""
    config = save_each_round(job.config)
    roster = Membership(grid, toml.to_toml(config))
    roster.wait(config.devices.number, config.fleet.wait_seconds, tuple(config.tiers))
    roster.settle(tuple(config.tiers))
    job.folder.mkdir(parents=True, exist_ok=True)
    roster.save(job.folder, job.flower)
    return roster, roster.fitted(config)


def reopen_fleet(grid: Grid, job: Job) -> tuple[Membership, Config]:
    """The fleet of a run that was begun; its devices may have other node ids by now, and some may come later."""
    before = toml.read_toml(job.folder / CONFIG)
    config = replace(before, rounds=max(before.rounds, job.config.rounds), fleet=job.config.fleet)
    roster = rosters.read_membership(job.folder, grid, config)
    roster.wait(config.devices.active, config.fleet.wait_seconds)
    roster.save(job.folder, job.flower)
    return roster, config


def save_each_round(config: Config) -> Config:
    """A round of a real fleet is too dear to be played again."""
    return replace(config, checkpoint=replace(config.checkpoint, rounds=1))


def build_fleet_experiment(app: App, roster: Membership, job: Job) -> Experiment:
    """The experiment on the server: all that a simulated one has, but for the devices' data and memories."""
    config, method = job.config, app.method_of(job.config)
    if method.name != config.method:
        config = replace(config, method=method.name)
    data = app.on_server(config)
    tier_of = assign_tiers(config)
    omega = compute_omega(rosters.samples(roster.members), tier_of, method.pools(tuple(config.tiers)))
    where = choose_device("auto")
    family = app.family_of(config, data)
    fleet = make_population(config, family, method, data.to(where), tier_of=tier_of, omega=omega)

    def engine(start: EngineParts) -> Engine:
        return Engine(
            FleetDevices(start.plain.population, roster, find_merged_rounds(job.folder), job.poll), start.scoring
        )

    more = min(config.devices.number, config.devices.active + config.fleet.spare_devices)
    draw = make_sampler(replace(config.devices, active=more), config.seed)
    return build.start_experiment(fleet, activate=make_fleet_sampler(draw, roster, config.seed), engine=engine)


def find_merged_rounds(folder: Path) -> Callable[[int], Mapping[int, int]]:
    """Round -> for each device the last round before it whose update was merged, by the run's own records."""

    def merged(number: int) -> Mapping[int, int]:
        found: dict[int, int] = {}
        for line in read_whole_lines(folder / ROUNDS, number - 1):
            record = json.loads(line)
            out = {*record["dropped"], *record.get("failed", ()), *record.get("late", ())}
            found |= {device: record["round"] for device in record["active"] if device not in out}
        return found

    return merged
