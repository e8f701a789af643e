"""`fedhen run`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedhen.cli.options import (
    add_machine,
    add_method_options,
    add_out,
    add_recipe,
    add_rounds,
    add_seeds,
    choose,
    spread_over_seeds,
)
from fedhen.cli.training import COMBINED, DATA_HELP, METHODS_HELP, train_seeds
from fedhen.errors import UserError

EXAMPLES = """\
examples:
  fedhen run digits --method fedhen
  fedhen run digits --method noside --seeds 0,1,2 --set training.lr=0.05 --set split.kind=iid
  fedhen run cifar10-iid --method fedhen --data-dir ~/data
  fedhen run cifar10-iid --data photos/     your own images: photos/train/CLASS/*.png, photos/test/CLASS/*.png
  fedhen run digits --method fedhen --local feddyn --set local.alpha=0.01
  fedhen run digits --method ./mymethod.py:MINE
  fedhen run --config runs/digits-fedhen-seed0/config.toml     repeats that run exactly

The run folder holds config.toml, rounds.jsonl, timing.jsonl, summary.json and models/*.safetensors.
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "run",
        help="train one method on a recipe",
        epilog=EXAMPLES + COMBINED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(command)
    command.add_argument("--method", metavar="M", help=f"{METHODS_HELP} (default: the recipe's, fedhen)")
    command.add_argument("--data", type=Path, metavar="PATH", help=DATA_HELP)
    add_rounds(command)
    add_seeds(command)
    add_method_options(command)
    add_out(command)
    add_machine(command)
    command.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    if options.method is not None and options.config is not None:
        raise UserError("--config brings its own method: leave out --method")
    choice = choose(options, method=options.method)
    config = choice.config
    local = f"-{config.local.name}" if config.local.name != "plain" else ""
    return train_seeds(spread_over_seeds(choice, options), options, f"{config.recipe}-{config.method}{local}")
