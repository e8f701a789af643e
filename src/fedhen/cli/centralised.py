"""`fedhen centralised`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedhen.cli.options import add_machine, add_out, add_recipe, add_rounds, add_seeds, choose, spread_over_seeds
from fedhen.cli.training import DATA_HELP, train_seeds
from fedhen.config.recipes import make_centralised
from fedhen.errors import UserError

EXAMPLES = """\
A round is an epoch: SGD with momentum 0.9, batches of 128, weight decay 0.0005, a learning rate of 0.1 that rises over
the first 5 of 100 epochs and falls to 0 along a cosine; augmentation and clip as in the recipe.

examples:
  fedhen centralised cifar10-iid --tier complex
  fedhen centralised cifar10-iid --tier simple --fraction 0.5      on the data of half of the devices
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "centralised",
        help="train the upper reference: one device of a tier that holds all the data",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(command)
    command.add_argument("--tier", metavar="TIER", required=True, help="which of the recipe's tiers")
    command.add_argument(
        "--fraction", type=float, metavar="X", default=1.0, help="share of the data (default: all of it)"
    )
    command.add_argument("--data", type=Path, metavar="PATH", help=DATA_HELP)
    add_rounds(command)
    add_seeds(command)
    add_out(command)
    add_machine(command)
    command.set_defaults(run=centralised_command)


def centralised_command(options: argparse.Namespace) -> int:
    if not 0 < options.fraction <= 1:
        raise UserError(f"--fraction {options.fraction:g}: it must be above 0 and at most 1")
    # The tier is the recipe's, not one that all devices of a population have.
    tier, options.tier = options.tier, None
    choice = choose(options, prepare=lambda recipe: make_centralised(recipe, tier, options.fraction))
    name = f"{choice.config.recipe}-{tier}-{choice.config.data.fraction:g}"
    return train_seeds(spread_over_seeds(choice, options), options, name)
