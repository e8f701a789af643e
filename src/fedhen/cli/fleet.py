"""`fedhen fleet`: a real fleet on Flower. Modules that need Flower or torch are imported when a command runs."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhen.cli import fleet_node, fleet_operator, fleet_server
from fedhen.cli.options import (
    add_method_options,
    add_recipe,
    add_rounds,
    add_run_dir,
    add_settings,
    apply_options,
    choose_one,
    config_from_options,
)
from fedhen.cli.training import METHODS_HELP, describe_result, name_run, read_planned_config
from fedhen.config.data_settings import OWN
from fedhen.config.settings import Config
from fedhen.config.toml import apply_settings, read_toml
from fedhen.errors import ConfigError, FedhenError, FleetError
from fedhen.fileio.locks import LOCK
from fedhen.interrupts import RunStopped, stop_on_first_signal
from fedhen.runs.folders import Words, create_fresh_folder, create_run_folders
from fedhen.runs.layout import CONFIG, FLEET, PRIVATE, RUNS, SUMMARY
from fedhen.runs.records import ACCURACY, MetricInfo
from fedhen.tracking.console import make_display
from fedhen.tracking.observers import RunInfo

if TYPE_CHECKING:
    from fedhen.fleet.superlink import SuperLinkClient

STARTING_SECONDS, LOADING_SECONDS = 10.0, 600.0
"""A start that has shown no sign of life for this long was killed: while it waits for nodes, and after that, while the
server loads its data."""
EXAMPLES = """\
examples:
  fedhen fleet up                        start a SuperLink, four nodes and a run on this machine, then stop everything
  fedhen fleet init my-fleet             write an app, certificates, and data for testing
  fedhen fleet serve my-fleet            run its server
  fedhen fleet add ward-3 --tier simple --fleet my-fleet        enrol a node: writes ward-3.toml
  fedhen fleet node ward-3.toml --data /data/ward-3.npz         run that node
  fedhen fleet run my-fleet              start a training
  fedhen fleet run my-fleet --resume runs/my-fleet-fedhen-fleet    resume it after a crash

docs/fleet.md is a tutorial, and explains who sees what.
"""
UP_EXAMPLES = """\
examples:
  fedhen fleet up --simple 2 --complex 2 --rounds 2
  fedhen fleet up --local scaffold --secure       with TLS and a key for every node
  fedhen fleet up digits-4 --nodes tiny=1 --nodes small=1 --nodes medium=1 --nodes large=1
"""


def add_commands(commands: Any) -> None:
    look = argparse.RawDescriptionHelpFormatter
    fleet = commands.add_parser("fleet", help="a real fleet on Flower", epilog=EXAMPLES, formatter_class=look)
    within = fleet.add_subparsers(dest="fleet_command", metavar="COMMAND", required=True)
    init = within.add_parser("init", help="write an app for a fleet, with certificates and test data")
    init.add_argument("folder", type=Path, metavar="DIR", help="where to write; it must not exist")
    init.add_argument("--recipe", default="digits", metavar="RECIPE", help="settings and test data (default: digits)")
    init.add_argument(
        "--address", default="127.0.0.1:8000", metavar="HOST:PORT", help="the server's address (default: %(default)s)"
    )
    add_nodes(init, default=1)
    init.set_defaults(run=init_command, config=None, settings=[])
    run = within.add_parser("run", help="start or resume a training on a running server")
    run.add_argument(
        "folder", nargs="?", type=Path, default=Path(), metavar="DIR", help="the fleet's folder (default: .)"
    )
    run.add_argument("--resume", type=Path, metavar="RUN", help="resume this run")
    add_run_dir(run)
    add_rounds(run)
    add_settings(run)
    run.add_argument("--quiet", action="store_true", help="show no progress")
    run.set_defaults(run=run_command)
    fleet_server.add_commands(within)
    fleet_operator.add_commands(within)
    fleet_node.add_commands(within)
    up = within.add_parser("up", help="run a whole fleet on this machine", epilog=UP_EXAMPLES, formatter_class=look)
    add_recipe(up, "digits")
    up.add_argument("--method", metavar="M", help=f"{METHODS_HELP} (default: the recipe's, fedhen)")
    add_method_options(up)
    add_nodes(up, default=2)
    up.add_argument("--rounds", type=int, metavar="N", default=3, help="communication rounds (default: %(default)s)")
    up.add_argument("--active", type=int, metavar="N", help="nodes that train in a round (default: all)")
    up.add_argument("--secure", action="store_true", help="use TLS and a key for every node")
    add_run_dir(up)
    up.add_argument("--quiet", action="store_true", help="show no progress")
    up.set_defaults(run=up_command)


def add_nodes(command: argparse.ArgumentParser, default: int) -> None:
    """Adds the options for the number of nodes of each tier."""
    for tier in ("simple", "complex"):
        command.add_argument(f"--{tier}", type=int, metavar="N", help=f"nodes of tier {tier} (default: {default})")
    command.add_argument(
        "--nodes", action="append", default=[], metavar="TIER=N", help="nodes of any other tier; may be repeated"
    )
    command.set_defaults(default_nodes=default)


def parse_nodes(options: argparse.Namespace, config: Config) -> dict[str, int]:
    """Returns tier -> number of nodes."""
    found = dict.fromkeys(config.tiers, options.default_nodes)
    given = {tier: getattr(options, tier) for tier in ("simple", "complex") if getattr(options, tier) is not None}
    for text in options.nodes:
        tier, equals, number = text.partition("=")
        if not equals or not number.isdigit():
            raise ConfigError(f"--nodes {text!r}: write TIER=N, like --nodes small=2")
        given[tier] = int(number)
    return {**found, **given}


def init_command(options: argparse.Namespace) -> int:
    require_flower()
    from fedhen.fleet.new_project import create_project, make_instructions
    from fedhen.fleet.processes import free_port
    from fedhen.fleet.project import FleetProject

    config = config_from_options(options)
    nodes = parse_nodes(options, config)
    # Absolute, so that the printed commands work in any working directory.
    project = FleetProject(options.folder.resolve(), f"127.0.0.1:{free_port()}", public=options.address)
    create_project(project, config, nodes)
    print(make_instructions(project, nodes))
    return 0


def run_command(options: argparse.Namespace) -> int:
    require_flower()
    from fedhen.fleet.processes import Processes
    from fedhen.fleet.project import SETTINGS, open_project
    from fedhen.fleet.superlink import SuperLinkClient

    if options.resume is not None and options.run_dir is not None:
        raise ConfigError("--resume continues in the run's folder: leave out --run-dir")
    project = open_project(options.folder.resolve())
    superlink = SuperLinkClient(project, Processes(project.path / "logs"))
    if options.resume is not None:
        config = restore_settings(options.resume, options.rounds, options.settings)
    else:
        config = apply_options(read_toml(project.path / SETTINGS), options)
    superlink.wait(0.0)
    run = options.resume or create_run(options.run_dir, config)
    follow_run(superlink, config, run, options)
    print(describe_result(run) if (run / SUMMARY).is_file() else f"the run has finished on the server, in {run}")
    return 0


def follow_run(superlink: SuperLinkClient, config: Config, run: Path, options: argparse.Namespace) -> None:
    """Starts a run and shows its rounds. Stops the run if this process is interrupted."""
    from fedhen.fleet.follow import follow, last_round, read_finished_rounds
    from fedhen.fleet.project import run_line
    from fedhen.fleet.status import note_run

    needed = config.devices.number if options.resume is None else config.devices.active
    lines = fleet_operator.RunLines(superlink.project, run, needed, options.quiet)
    resume_command, after = run_line(superlink.project.path, run), last_round(run)
    with stop_on_first_signal() as first:
        # Until its number is known, the run could not be stopped.
        first.held = True
        lines.begin()
        number = superlink.start(config, run, options.resume is not None)
        try:
            first.release()
            note_run(superlink.project, run, number)
            with make_display({config.method: config.rounds}, find_metric(config), options.quiet) as shown:
                shown.start(RunInfo(config.method, config.rounds, after, run))
                for record, timing in follow(superlink, number, run, after, config.rounds, resume_command, lines.look):
                    shown.round(record, timing)
                    lines.tell_round(record)
        except RunStopped as stop:
            message = stop_run(superlink, number)
            # Before its first round and after its last there is nothing to resume.
            is_left = (run / CONFIG).is_file() and read_finished_rounds(run) < config.rounds
            raise RunStopped(stop.signal, f"{message}; resume with: {resume_command}" if is_left else message) from None


def stop_run(superlink: SuperLinkClient, number: str) -> str:
    """Stops a run on the SuperLink. Returns the outcome as a message."""
    try:
        superlink.stop(number)
    except FedhenError as error:
        return f"the run could not be stopped: {error}"
    return "stopped"


def restore_settings(run: Path, rounds: int | None, changes: Sequence[str]) -> Config:
    """Returns a run's configuration with the given rounds, and with changes, which may be of [fleet] alone."""
    config = read_planned_config(run, rounds)
    if other := [each for each in changes if not each.startswith("fleet.")]:
        raise ConfigError(f"--set {other[0]}: a resumed run keeps its settings, except those of fleet; leave it out")
    return apply_settings(config, changes)


def up_command(options: argparse.Namespace) -> int:
    require_flower()
    from fedhen.fleet.local_fleet import LocalFleet
    from fedhen.fleet.project import fit_to_nodes

    config = choose_one(options, default="digits").config
    nodes = parse_nodes(options, config)
    config = fit_to_nodes(config, nodes, options.active)
    run = create_run(options.run_dir, config)
    local_fleet = LocalFleet(
        run / "fleet", config, nodes, options.secure, report=(lambda _: None) if options.quiet else print_message
    )
    with (
        stop_on_first_signal(),
        local_fleet.start(),
        make_display({config.method: config.rounds}, find_metric(config), options.quiet) as shown,
    ):
        shown.start(RunInfo(config.method, config.rounds, folder=run))
        for record, timing in local_fleet.play(run):
            shown.round(record, timing)
    print(describe_result(run))
    return 0


def find_metric(config: Config) -> MetricInfo:
    """Returns the primary metric of the task that the configuration names. The app may have another task."""
    from fedhen.experiment.prepared_runs import primary_metric
    from fedhen.tasks.registry import make_task

    return ACCURACY if config.task.name == OWN else primary_metric(make_task(config.task))


def create_run(run_dir: Path | None, config: Config) -> Path:
    """Creates the folder of a new run."""
    name = f"{name_run(config)}-fleet"
    if run_dir is None:
        return create_fresh_folder(RUNS, name)
    if was_not_begun(run_dir):
        return run_dir
    # These commands have no --overwrite.
    return create_run_folders(run_dir, [""], words=Words("--run-dir"))[0]


def was_not_begun(run_dir: Path) -> bool:
    """Returns whether a folder has only what a start leaves that was stopped while it waited for nodes."""
    from fedhen.fleet.board import BOARD, read_board

    names = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    left = {BOARD, FLEET, LOCK, PRIVATE}
    board = read_board(run_dir)
    if BOARD not in names or names - left or board is None:
        return False
    return time.time() - board.at > (LOADING_SECONDS if FLEET in names else STARTING_SECONDS)


def print_message(message: str) -> None:
    print(f"fedhen: {message}", file=sys.stderr, flush=True)


def require_flower() -> None:
    """Raises `FedhenError` if Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise FleetError("a fleet needs Flower, which is not installed: pip install 'fedhen[flower]'")
