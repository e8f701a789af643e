"""`fedhen evaluate`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhen.cli.exit_study import show_exits
from fedhen.cli.options import add_data_dir
from fedhen.cli.user_files import add_own_parts_again, check_again, load_own_parts
from fedhen.config import toml
from fedhen.config.runtime_settings import ACCELERATORS
from fedhen.errors import FedhenError
from fedhen.runs.folders import find_config, find_run_folders
from fedhen.runs.layout import MODEL_OWNERS, MOMENTS
from fedhen.runs.reader import Run, read_run
from fedhen.runs.records import ACCURACY, MetricInfo, Values

if TYPE_CHECKING:
    from fedhen.api.saved import Scores

EXAMPLES = """\
examples:
  fedhen evaluate runs/digits-fedhen-seed0
  fedhen evaluate runs/digits-fedhen-seed0 --at best --of server

The models of a run that is not finished are those of its newest checkpoint. The best ones were chosen on the test set,
unless evaluation.validation holds training examples out for that.
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "evaluate",
        help="score the models of a run again, also of one that was stopped or is still played",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument("--of", choices=MODEL_OWNERS, help="whose models (default: of both)")
    command.add_argument(
        "--at",
        choices=MOMENTS,
        default="last",
        help="models of the last round, or each of its best one (default: %(default)s)",
    )
    command.add_argument(
        "--exits",
        action="store_true",
        help="study the early exits of the last tier's server model, and show them in reports from then on",
    )
    add_own_parts_again(command)
    add_data_dir(command)
    command.add_argument(
        "--accelerator", choices=ACCELERATORS, default="auto", help="where to compute (default: %(default)s)"
    )
    command.set_defaults(run=evaluate_command)


def evaluate_command(options: argparse.Namespace) -> int:
    folders = list(find_run_folders([options.run_folder]))
    if folders != [options.run_folder]:
        raise FedhenError(f"{options.run_folder} holds several runs: choose from {', '.join(map(str, folders))}")
    run = read_run(options.run_folder)
    if run.summary is not None and not run.summary.final and not run.stopped:
        raise FedhenError(f"{options.run_folder} has no recorded {run.metric.name} to compare with")
    from fedhen.api.saved import evaluate

    check_again(options, toml.read_toml(find_config(options.run_folder)))
    own = load_own_parts(options)
    if options.exits:
        return show_exits(options, own)
    scores = evaluate(
        options.run_folder,
        of=options.of,
        at=options.at,
        family=own.family,
        data=own.data,
        task=own.task,
        accelerator=options.accelerator,
        data_dir=options.data_dir,
    )
    return print_scores(run, scores)


def print_scores(run: Run, scores: Scores) -> int:
    """Prints the scores beside the recorded ones. Returns 1 if some differ, else 0."""
    width = 10 if run.metric == ACCURACY else max(12, len(run.metric.title) + 2)
    print(f"{'models':10}{'tier':12}{'round':>6}{run.metric.title:>{width}}{'recorded':>{width}}")
    same = True
    for owner, tiers in scores.items():
        for tier, score in tiers.items():
            number = scores.rounds[owner][tier]
            found, recorded = score if math.isfinite(score) else None, find_recorded(run, number)
            differs = bool(recorded) and found != recorded[owner][tier]
            same &= not differs
            cells = format_score(run.metric, found), "–"
            if recorded:
                cells = cells[0], format_score(run.metric, recorded[owner][tier])
            line = f"{owner:10}{tier:12}{number or '–':>6}{cells[0]:>{width}}{cells[1]:>{width}}"
            print(f"{line}{'  differs' * differs}")
    return 0 if same else 1


def find_recorded(run: Run, number: int) -> Values:
    """Returns the recorded values of a round; empty if it was not evaluated."""
    if run.summary is not None and not run.stopped and number == run.summary.rounds:
        return run.summary.final
    return run.rounds[number - 1].values(run.metric.name) if 0 < number <= len(run.rounds) else {}


def format_score(metric: MetricInfo, value: float | None) -> str:
    """Writes a value as reports do, percents with one decimal more."""
    return f"{100 * value:.2f} %" if metric.unit == "%" and value is not None else metric.format(value)
