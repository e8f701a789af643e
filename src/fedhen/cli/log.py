"""`fedhen log`."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from fedhen.config.validation import flatten_config
from fedhen.errors import ConfigError, FedhenError
from fedhen.fileio.locks import lock_folder
from fedhen.runs.folders import find_run_folders
from fedhen.runs.reader import Run, read_run
from fedhen.tracking.observers import STOPPED, RunInfo, describe, read_end
from fedhen.tracking.tracker import Tracker, read_logged
from fedhen.tracking.trackers import TRACKERS, check_track, make_tracker

EXAMPLES = """\
examples:
  fedhen log runs/digits-fedhen-seed0 --to tensorboard
  fedhen log runs/digits-compare --to mlflow,tensorboard     all runs in that folder

Rounds that a tracker has are not logged again. `--track` logs a run while it is played.
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "log",
        help="log runs to TensorBoard, MLflow, Weights & Biases or Trackio afterwards",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders that contain them")
    command.add_argument(
        "--to",
        action="append",
        required=True,
        metavar="TRACKER",
        help=f"{', '.join(TRACKERS)}; several are separated by commas",
    )
    command.set_defaults(run=log_command)


def log_command(options: argparse.Namespace) -> int:
    trackers = [make_tracker(str(name)) for name in check_track(options.to, "--to")]
    if not trackers:
        raise ConfigError(f"--to: choose from {', '.join(TRACKERS)}")
    for folder in find_run_folders(options.runs):
        with lock_folder(folder):
            run = read_run(folder)
            for damage in run.damage:
                warnings.warn(f"{folder}: {damage}", stacklevel=1)
            for tracker in trackers:
                print(log_run(run, tracker))
    return 0


def log_run(run: Run, tracker: Tracker) -> str:
    """Logs the rounds that a tracker does not have yet. Returns what was done, in one line."""
    before, played = read_logged(run.folder).get(tracker.name), len(run.rounds)
    if before is not None and before.round >= played and (before.finished or run.summary is None):
        return f"{run.folder}: {tracker.name} has all {played} rounds"
    info = RunInfo(run.method, run.settings.rounds, played, run.folder, flatten_config(run.config), run.metrics)
    try:
        tracker.start(info)
        tracker.end(read_end(run.folder, STOPPED))
    except Exception as error:
        raise FedhenError(f"{run.folder} could not be logged to {tracker.name}: {describe(error)}") from None
    return f"{run.folder}: {played} rounds logged to {tracker.name} ({tracker.sink.place})"
