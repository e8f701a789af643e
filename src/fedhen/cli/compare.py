"""`fedhen compare`."""

from __future__ import annotations

import argparse
from typing import Any

from fedhen.cli.options import add_method_options, add_recipe, add_training_options, choose, parse_seeds
from fedhen.cli.training import COMBINED, METHODS_HELP, train_below
from fedhen.config.recipes import PAPERS_METHODS
from fedhen.distributed.communicator import current_ranks
from fedhen.errors import ConfigError
from fedhen.reports import write_report
from fedhen.runs.reader import read_run

EXAMPLES = """\
examples:
  fedhen compare
  fedhen compare digits --rounds 20 --seeds 0,1,2 --run-dir my-comparison
  fedhen compare --config my.toml --methods fedhen,noside
  fedhen compare digits --methods fedhen,noside,decouple,heterofl --local feddyn
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "compare",
        help="train several methods on a recipe, then write the report",
        epilog=EXAMPLES + COMBINED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(command, "digits")
    command.add_argument(
        "--methods",
        metavar="M,M",
        default=",".join(PAPERS_METHODS),
        help=f"methods, separated by commas: {METHODS_HELP} (default: %(default)s)",
    )
    add_method_options(command)
    add_training_options(command)
    command.set_defaults(run=compare_command, fits_devices=True)


def compare_command(options: argparse.Namespace) -> int:
    from fedhen.experiment.choices import plan_comparison

    methods = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not methods or len(set(methods)) < len(methods):
        raise ConfigError(f"--methods {options.methods!r}: name each method once, like {','.join(PAPERS_METHODS)}")
    by_method = [choose(options, default="digits", method=name) for name in methods]
    jobs = plan_comparison(by_method, parse_seeds(options))
    folders = train_below(jobs, options, f"{jobs[0].config.recipe}-compare")
    if current_ranks().rank:
        return 0
    # Sorted by name, as in `fedhen report`, so that the columns have the same order, which is also the paper's.
    parent = folders[0].parent
    report = write_report([read_run(folder) for folder in sorted(folders)], parent)
    print(report.text)
    print(f"page: {parent / 'report.html'}")
    return 0
