"""`fedhen run`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedhen.cli.options import add_method_options, add_recipe, add_training_options, choose_one, spread_over_seeds
from fedhen.cli.training import COMBINED, METHODS_HELP, name_run, train_seeds
from fedhen.runs.private import read_secret_file

EXAMPLES = """\
examples:
  fedhen run digits --method fedhen
  fedhen run digits --method noside --seeds 0,1,2 --set training.lr=0.05 --set split.kind=iid
  fedhen run cifar10-iid --method fedhen --data-dir ~/data
  fedhen run cifar10-iid --data photos/     your own images: photos/train/CLASS/*.png, photos/test/CLASS/*.png
  fedhen run digits --method fedhen --local feddyn --set local.alpha=0.01
  fedhen run digits --method ./mymethod.py:MINE
  fedhen run --family ./my.py:FAMILY --data people.csv --set data.by=user --set data.target=ill     your own model
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
    add_method_options(command)
    add_training_options(command)
    command.add_argument(
        "--secret",
        type=Path,
        metavar="FILE",
        help="private/secret of a fleet's run, to simulate it: random choices follow from it in place of the seed",
    )
    command.set_defaults(run=run_command, fits_devices=True)


def run_command(options: argparse.Namespace) -> int:
    options.secret = read_secret_file(options.secret) if options.secret else b""
    choice = choose_one(options)
    return train_seeds(spread_over_seeds(choice, options), options, name_run(choice.config))
