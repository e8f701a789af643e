"""`fedhen fleet deliver`: sends the models of a finished run to the nodes."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhen.cli.fleet_server import add_fleet_option, open_fleet
from fedhen.config.settings import Config
from fedhen.config.toml import read_toml
from fedhen.errors import FleetError
from fedhen.interrupts import stop_on_first_signal
from fedhen.runs.folders import find_config
from fedhen.runs.layout import SUMMARY

if TYPE_CHECKING:
    from fedhen.fleet.app import App
    from fedhen.fleet.delivery import Delivered
    from fedhen.fleet.project import FleetProject
    from fedhen.fleet.superlink import SuperLinkClient

EXAMPLES = """\
examples:
  fedhen fleet deliver runs/ward --fleet my-fleet --export onnx      each node gets the model of its tier as ONNX
  fedhen predict ~/.local/state/fedhen/ward-3/models/current x.npy   there, without torch

Nodes that are not connected are named: run the command again when they are.
"""
APPS = "fleet_app.apps"
LOOK_SECONDS, STATUS_SECONDS = 0.5, 10.0


def add_command(within: Any) -> None:
    deliver = within.add_parser(
        "deliver",
        help="send each node the finished model of its tier",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    deliver.add_argument("run_folder", type=Path, metavar="RUN", help="a finished run")
    deliver.add_argument(
        "--export", choices=("onnx",), help="as an export, which `fedhen predict` uses there (default: safetensors)"
    )
    add_fleet_option(deliver)
    deliver.set_defaults(run=deliver_command)


def deliver_command(options: argparse.Namespace) -> int:
    from fedhen.cli.fleet import print_message
    from fedhen.fleet.delivery import note_deliveries
    from fedhen.fleet.processes import Processes
    from fedhen.fleet.superlink import SuperLinkClient

    project, run = open_fleet(options.folder), options.run_folder.resolve()
    config = read_toml(find_config(run))
    superlink = SuperLinkClient(project, Processes(project.path / "logs"))
    superlink.wait(0.0)
    prepare_delivery(project, run, config, options.export or "")
    with stop_on_first_signal() as first:
        first.held = True
        number = superlink.start(config, run, deliver=True)
        first.release()
        delivered = wait_for_delivery(superlink, run, number)
    note_deliveries(project.path, run, delivered)
    for each in delivered:
        outcome = f"has {each.digest[:16]}" if each.digest else f"not delivered: {each.error}"
        print(f"{each.name or each.node} ({each.tier or 'no tier'}): {outcome}")
    if not delivered:
        print_message("no node is connected")
    return 0 if delivered and all(each.digest for each in delivered) else 1


def prepare_delivery(project: FleetProject, run: Path, config: Config, export: str) -> None:
    """Writes what each tier gets into the run's folder: an export, or the model's own file."""
    if not (run / SUMMARY).is_file():
        raise FleetError(f"{run} is not finished: play it to its end, or end it with `fedhen finish {run}`")
    from fedhen.fleet.delivery import DELIVERY, prepare_safetensors

    delivery = run / DELIVERY
    shutil.rmtree(delivery, ignore_errors=True)
    if not export:
        prepare_safetensors(run, delivery, list(config.tiers))
        return
    from fedhen.deploy.export import export_models

    source = read_source(load_app(project), run, config)
    delivery.mkdir()
    for tier in config.tiers:
        export_models(source, delivery / tier, to=export, tier=tier)


def load_app(project: FleetProject) -> App:
    """Imports the fleet's app, as its server does."""
    from fedhen.fleet.app import App

    sys.path.insert(0, str(project.path))
    try:
        found = getattr(importlib.import_module(APPS), "APP", None)
    except Exception as error:
        raise FleetError(f"{project.path / 'fleet_app'} cannot be imported: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(str(project.path))
    if not isinstance(found, App):
        raise FleetError(f"{project.path / 'fleet_app' / 'apps.py'} has no APP = App(...): an export needs its data")
    return found


def read_source(app: App, run: Path, config: Config) -> Any:
    """Returns the models of a run with the server's data, on which an export is checked."""
    from fedhen.api.deploying import make_source

    return make_source(run, family=app.family, data=app.load_server_data(config), task=app.task)


def wait_for_delivery(superlink: SuperLinkClient, run: Path, number: str) -> list[Delivered]:
    """Waits until the server's app has written who has the models. Raises `FleetError` if it ends before that."""
    from fedhen.fleet.delivery import read_delivered

    asked_at = time.monotonic()
    while (found := read_delivered(run, number)) is None:
        if time.monotonic() - asked_at >= STATUS_SECONDS:
            asked_at = time.monotonic()
            status = superlink.status(number)
            if status.startswith("finished") and read_delivered(run, number) is None:
                raise FleetError(f"the models were not delivered: {superlink.find_error(number) or status}")
        time.sleep(LOOK_SECONDS)
    return found
