"""`fedhen resume`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedhen.cli.options import add_machine, add_stop, add_tracking, parse_stop
from fedhen.cli.training import describe_result, read_planned_config, train_all
from fedhen.cli.user_files import add_own_parts_again, check_again, find_files
from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.distributed.communicator import current_ranks
from fedhen.errors import ConfigError
from fedhen.fileio.python_files import refuse_reference, resolve_reference
from fedhen.runs.folders import refuse_fleet_run
from fedhen.runs.private import read_secret
from fedhen.runs.reader import read_run

EXAMPLES = """\
examples:
  fedhen resume runs/digits-fedhen-seed0
  fedhen resume runs/digits-fedhen-seed0 --rounds 80      40 rounds more than planned
  fedhen resume runs/digits-fedhen-seed0 --patience 0     after it has stopped by itself
  fedhen resume runs/custom-on-people-fedhen-seed0 --family ./my.py:FAMILY    your own files are named again
  fedhen compare digits --run-dir my-comparison --resume      all runs of an interrupted command

On a CPU the result has the same bytes as that of a run without the interruption.
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "resume",
        help="resume an interrupted run, or add rounds to a finished one",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument("--rounds", type=int, metavar="N", help="play up to this round (default: as planned)")
    add_stop(command)
    command.add_argument(
        "--restart", action="store_true", help="start again at round 1, for example if every checkpoint is damaged"
    )
    command.add_argument("--method", metavar="FILE.py:NAME", help="the run's method, if it is your own")
    add_own_parts_again(command)
    add_machine(command)
    add_tracking(command)
    command.set_defaults(run=resume_command)


def resume_command(options: argparse.Namespace) -> int:
    from fedhen.algorithm.methods import load_method
    from fedhen.distributed import process_group
    from fedhen.experiment.choices import Job
    from fedhen.hardware.accelerator import choose_device

    folder: Path = options.folder
    ranks = process_group.join(choose_device(options.accelerator))
    # Rank 0 reads the folder, because the other ranks may not see it.
    config = toml.parse_toml(ranks.first(lambda: toml.to_toml(read_resumable(folder, options))))
    options.secret = bytes.fromhex(ranks.first(lambda: read_secret(folder).hex()))
    check_again(options, config)
    method = load_method(choose_method(config, options.method), find_files(options))
    options.resume = True
    played = train_all([Job(config.method, "", config, method)], options, lambda: [folder])
    if not current_ranks().rank:
        if not played:
            print(f"{folder} is finished: {how_to_continue(folder)}")
        print(describe_result(folder))
    return 0


def choose_method(config: Config, given: str | None) -> str:
    """Returns the method of the run. A file is executed only if the user names it too."""
    if config.method_file and (given is None or resolve_reference(given) != config.method_file):
        refuse_reference(config.method_file, "method")
    if not config.method_file and given not in (None, config.method):
        raise ConfigError(f"--method {given}: the run's method is {config.method}")
    return config.method_file or config.method


def read_resumable(folder: Path, options: argparse.Namespace) -> Config:
    refuse_fleet_run(folder)
    return read_planned_config(folder, options.rounds, parse_stop(options))


def how_to_continue(folder: Path) -> str:
    rule = ", or change its rule with --until or --patience" if read_run(folder).stopped else ""
    return f"add rounds with --rounds N{rule}"
