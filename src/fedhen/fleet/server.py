"""The server of a real fleet: the simulator's experiment and run folder, with Flower's nodes as the devices."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from flwr.serverapp import Grid

from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.devices.population import assign_tiers, compute_omega, make_population
from fedhen.engines.engine import Engine, EngineParts
from fedhen.errors import FleetError
from fedhen.experiment import build
from fedhen.experiment.experiment import Experiment, Step
from fedhen.experiment.resume import ResumePolicy
from fedhen.experiment.runner import play_run
from fedhen.fleet.app import App
from fedhen.fleet.board import BoardWriter
from fedhen.fleet.engine import POLL_SECONDS, FleetDevices
from fedhen.fleet.fleet_roster import FleetRoster, count_samples
from fedhen.fleet.membership import Membership, read_membership
from fedhen.fleet.need_to_know import describe_run
from fedhen.fleet.own_scores import FleetScores
from fedhen.fleet.run_settings import START_ANOTHER_RUN
from fedhen.hardware.accelerator import choose_device
from fedhen.runs.layout import CONFIG, FLEET, PRIVATE, SECRET
from fedhen.runs.private import read_participation, read_secret
from fedhen.seeds import RunStreams, draw_secret


@dataclass(frozen=True)
class FleetRun:
    """A run that a fleet is to play."""

    config: Config
    folder: Path
    resume: bool = False
    flower_run: int = 0
    """Flower's number of the run."""
    poll: float = POLL_SECONDS
    secret: bytes = field(default_factory=draw_secret, repr=False)
    """What the random streams of server and devices follow from, unless there is a secret in the folder already."""


def play(grid: Grid, app: App, run: FleetRun) -> Generator[Step, None, None]:
    """Plays the remaining rounds with the connected nodes. Every round is saved."""
    if run.config.evaluation.validation:
        raise FleetError(
            "evaluation.validation needs training data, which the server of a fleet never sees: set it to 0"
        )
    if run.config.attack.kind != "none":
        raise FleetError("attack.kind plays bad devices in simulations only: set it to none")
    if run.config.clock.profile:
        raise FleetError("clock.profile is for simulations, a real fleet takes its own time: leave it empty")
    if run.config.devices.held_out:
        raise FleetError("devices.held_out keeps devices of simulations out of training: set it to 0")
    begun = is_begun(run)
    run = replace(run, secret=find_secret(run))
    if begun:
        membership, config = reopen_fleet(grid, run)
    else:
        membership, config = gather_fleet(grid, app, run)
    experiment = build_fleet_experiment(app, membership, replace(run, config=config))
    yield from play_run(run.folder, experiment, ResumePolicy(resume=run.resume, otherwise=START_ANOTHER_RUN))


def is_begun(run: FleetRun) -> bool:
    """Returns whether the folder holds a run. Raises `FleetError` if it does and the run is not to be resumed."""
    begun = (run.folder / CONFIG).is_file()
    if begun and not run.resume:
        raise FleetError(f"{run.folder} holds a run: resume it with --resume {run.folder}, or choose another --run-dir")
    return begun


def find_secret(run: FleetRun) -> bytes:
    """Returns the secret in the run's folder, or that of a new run. Raises `FleetError` if a run has lost its own."""
    secret = read_secret(run.folder)
    if not secret and (run.folder / CONFIG).is_file() and (run.folder / FLEET).is_file():
        raise FleetError(f"{run.folder / PRIVATE / SECRET} is missing: restore it, or {START_ANOTHER_RUN}")
    return secret or run.secret


def gather_fleet(grid: Grid, app: App, run: FleetRun) -> tuple[Membership, Config]:
    """Gathers the fleet of a new run. Waits until enough nodes are connected."""
    config = save_each_round(run.config)
    membership = Membership(grid, describe_run(config), tell=BoardWriter(run.folder).show)
    membership.wait_for_nodes(config.devices.number, config.fleet.wait_seconds, tuple(config.tiers))
    membership.number_devices(tuple(config.tiers))
    run.folder.mkdir(parents=True, exist_ok=True)
    membership.save(run.folder, run.flower_run)
    return membership, app.name_parts(membership.fit_config(config))


def reopen_fleet(grid: Grid, run: FleetRun) -> tuple[Membership, Config]:
    """Reads the fleet of a run that has begun. Its devices may have other node ids now, and some may connect later."""
    before = toml.read_toml(run.folder / CONFIG)
    config = replace(before, rounds=max(before.rounds, run.config.rounds), fleet=run.config.fleet)
    membership = read_membership(run.folder, grid, config, BoardWriter(run.folder).show)
    membership.wait_for_nodes(config.devices.active, config.fleet.wait_seconds)
    membership.save(run.folder, run.flower_run)
    return membership, config


def save_each_round(config: Config) -> Config:
    """Returns the configuration with a checkpoint after every round: repeating a round of a real fleet is expensive."""
    return replace(config, checkpoint=replace(config.checkpoint, rounds=1))


def build_fleet_experiment(app: App, membership: Membership, run: FleetRun) -> Experiment:
    """Builds the experiment on the server. Unlike a simulated one, it has no device data and no device memories."""
    config, method = run.config, app.resolve_method(run.config)
    if method.name != config.method:
        config = replace(config, method=method.name)
    data = app.load_server_data(config)
    tier_of = assign_tiers(config)
    examples = count_samples(membership.members_of(1)[: len(tier_of)])
    omega = compute_omega(examples, tier_of, method.pools(tuple(config.tiers)))
    where = choose_device("auto")
    task = app.resolve_task(config)
    outputs = app.classes or task.count_outputs(data.y_test, data.classes)
    family = app.resolve_family(config, data, outputs)
    population = make_population(
        config,
        family,
        method,
        data.to(where),
        tier_of=tier_of,
        omega=omega,
        examples=examples,
        task=task,
        outputs=outputs,
        streams=RunStreams(run.secret),
    )

    roster = FleetRoster(population, membership, run.folder, run.flower_run)

    def engine(start: EngineParts) -> Engine:
        read_merged = partial(read_merged_rounds, run.folder)
        devices = FleetDevices(start.plain.population, membership, read_merged, run.poll)
        return Engine(devices, start.scoring, FleetScores(devices).score, admit=devices.admit)

    return build.start_experiment(population, activate=roster.draw, engine=engine, roster=roster.take, is_fleet=True)


def read_merged_rounds(folder: Path, number: int) -> dict[int, int]:
    """Reads from the run's records, for each device, the last round before `number` whose update was merged."""
    merged: dict[int, int] = {}
    for record in read_participation(folder, number - 1):
        out = {*record["dropped"], *record.get("failed", ()), *record.get("late", ())}
        merged |= {device: record["round"] for device in record["active"] if device not in out}
    return merged
