"""`fedhen finish`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedhen.cli.training import describe_result

EXAMPLES = """\
examples:
  fedhen finish runs/digits-fedhen-seed0      writes its models and its summary
  fedhen resume runs/digits-fedhen-seed0      plays the remaining rounds all the same

The run ends after the round of its newest checkpoint; later records are removed. Stop the run first, with Ctrl-C.
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "finish",
        help="end an interrupted run where it is, with its models and its summary",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    command.set_defaults(run=finish_command)


def finish_command(options: argparse.Namespace) -> int:
    from fedhen.experiment.finish import finish_run

    if not finish_run(options.folder):
        print(f"{options.folder} is already finished")
    print(describe_result(options.folder))
    return 0
