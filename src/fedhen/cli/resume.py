"""`fedhen resume`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhen.cli.options import add_machine
from fedhen.cli.training import Job, describe_result, train_all
from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.distributed.communicator import current_ranks
from fedhen.errors import UserError
from fedhen.runs.folders import refuse_fleet_run
from fedhen.runs.layout import CONFIG

EXAMPLES = """\
examples:
  fedhen resume runs/digits-fedhen-seed0
  fedhen resume runs/digits-fedhen-seed0 --rounds 80      40 rounds more than were planned
  fedhen compare digits --out my-comparison --resume      all runs of an interrupted command

On a CPU the rest of the run is, to the byte, what it would have been without the interruption.
"""


def add_commands(commands: Any) -> None:
    """Add it to the parser."""
    command = commands.add_parser(
        "resume",
        help="go on with an interrupted run, or add rounds to a finished one",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument("--rounds", type=int, metavar="N", help="play up to this round (default: as planned)")
    command.add_argument(
        "--restart", action="store_true", help="start again at round 1, as where every checkpoint is damaged"
    )
    add_machine(command)
    command.set_defaults(run=resume_command)


def resume_command(options: argparse.Namespace) -> int:
    """`fedhen resume`."""
    from fedhen.algorithm.methods import load_method
    from fedhen.distributed import process_group
    from fedhen.hardware.accelerator import choose_device

    folder: Path = options.folder
    ranks = process_group.join(choose_device(options.accelerator))
    # By rank 0's folder: the other ranks may not see it.
    config = toml.parse_toml(ranks.first(lambda: toml.to_toml(read_planned_config(folder, options.rounds))))
    method = load_method(config.method_file or config.method)
    options.resume = True
    played = train_all([Job(config.method, "", config, method)], options, lambda: [folder])
    if not current_ranks().rank:
        if not played:
            print(f"{folder} is finished: --rounds N adds more")
        print(describe_result(folder))
    return 0


def read_planned_config(folder: Path, rounds: int | None) -> Config:
    """The configuration of a run, with so many rounds if that is said."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}")
    refuse_fleet_run(folder)
    config = toml.read_toml(folder / CONFIG)
    if rounds is None:
        return config
    if rounds < config.rounds:
        raise UserError(f"{folder} is planned for {config.rounds} rounds: some can be added, none taken away")
    return replace(config, rounds=rounds)
