"""`fedhen evaluate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedhen.cli.options import add_data_dir
from fedhen.cli.own_parts import add_own_parts_again, check_again, load_own_parts
from fedhen.cli.report import find_run_folders
from fedhen.config.settings import ACCELERATORS
from fedhen.errors import UserError
from fedhen.runs.reader import read_run


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
        raise UserError(f"{options.run_folder} is damaged: its summary has no final accuracies")
    from fedhen.api import evaluate

    check_again(options)
    own = load_own_parts(options)
    scores = evaluate(
        options.run_folder,
        family=own.family,
        data=own.data,
        task=own.task,
        accelerator=options.accelerator,
        data_dir=options.data_dir,
    )
    print(f"{'models':10}{'tier':12}{'accuracy':>10}{'recorded':>10}")
    same = True
    for kind, tiers in scores.items():
        for tier, score in tiers.items():
            recorded = run.summary.final[kind][tier]
            same &= score == recorded
            mark = "" if score == recorded else "  differs"
            print(f"{kind:10}{tier:12}{100 * score:>8.2f} %{100 * recorded:>8.2f} %{mark}")
    return 0 if same else 1
