"""`fedhen evaluate`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from fedhen.cli.options import add_data_dir
from fedhen.cli.own_parts import add_own_parts_again, check_again, load_own_parts
from fedhen.cli.report import find_run_folders
from fedhen.config import toml
from fedhen.config.settings import ACCELERATORS
from fedhen.errors import UserError
from fedhen.runs.folders import find_config
from fedhen.runs.reader import read_run
from fedhen.runs.records import ACCURACY, MetricInfo


def add_commands(commands: Any) -> None:
    command = commands.add_parser("evaluate", help="score the saved models of a run again")
    command.add_argument("run_folder", type=Path, metavar="RUN", help="a finished run folder")
    add_own_parts_again(command)
    add_data_dir(command)
    command.add_argument("--accelerator", choices=ACCELERATORS, default="auto", help="default: %(default)s")
    command.set_defaults(run=evaluate_command)


def evaluate_command(options: argparse.Namespace) -> int:
    folders = list(find_run_folders([options.run_folder]))
    if folders != [options.run_folder]:
        raise UserError(f"{options.run_folder} holds several runs: choose from {', '.join(map(str, folders))}")
    run = read_run(options.run_folder)
    if run.summary is None:
        raise UserError(f"{options.run_folder} is not finished: it has no saved models yet")
    if not run.summary.final:
        raise UserError(f"{options.run_folder} has no recorded {run.metric.name} to compare with")
    from fedhen.api import evaluate

    check_again(options, toml.read_toml(find_config(options.run_folder)))
    own = load_own_parts(options)
    scores = evaluate(
        options.run_folder,
        family=own.family,
        data=own.data,
        task=own.task,
        accelerator=options.accelerator,
        data_dir=options.data_dir,
    )
    width = 10 if run.metric == ACCURACY else max(12, len(run.metric.name) + 2)
    print(f"{'models':10}{'tier':12}{run.metric.name:>{width}}{'recorded':>{width}}")
    same = True
    for kind, tiers in scores.items():
        for tier, score in tiers.items():
            found, recorded = score if math.isfinite(score) else None, run.summary.final[kind][tier]
            same &= found == recorded
            mark = "" if found == recorded else "  differs"
            cells = format_score(run.metric, found), format_score(run.metric, recorded)
            print(f"{kind:10}{tier:12}{cells[0]:>{width}}{cells[1]:>{width}}{mark}")
    return 0 if same else 1


def format_score(metric: MetricInfo, value: float | None) -> str:
    """Writes a value as reports do, percents with one decimal more."""
    return f"{100 * value:.2f} %" if metric.unit == "%" and value is not None else metric.format(value)
