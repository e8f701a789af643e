"""`fedhen centralised`."""

from __future__ import annotations

import argparse
from typing import Any

from fedhen.cli.options import add_recipe, add_training_options, choose, spread_over_seeds
from fedhen.cli.training import train_seeds
from fedhen.config.recipes import make_centralised
from fedhen.errors import ConfigError

EXAMPLES = """\
A round is an epoch. There are 100 epochs of SGD with momentum 0.9, batches of 128 and weight decay 0.0005. The learning
rate rises to 0.1 over the first 5 epochs, then falls to 0 along a cosine. Augmentation and clip are the recipe's. A
recipe with another optimiser, like shakespeare, keeps its optimiser, learning rate and batches.

examples:
  fedhen centralised cifar10-iid --tier complex
  fedhen centralised cifar10-iid --tier simple --fraction 0.5      on the data of half the devices
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "centralised",
        help="train the upper reference: one device that holds all the data",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(command)
    command.add_argument("--tier", metavar="TIER", required=True, help="a tier of the recipe")
    command.add_argument(
        "--fraction", type=float, metavar="X", default=1.0, help="share of the data (default: all of it)"
    )
    add_training_options(command)
    command.set_defaults(run=centralised_command)


def centralised_command(options: argparse.Namespace) -> int:
    if not 0 < options.fraction <= 1:
        raise ConfigError(f"--fraction {options.fraction:g}: it must be above 0 and at most 1")
    # With `options.tier` set, `choose` would give this tier to every device of the population.
    tier, options.tier = options.tier, None
    choice = choose(options, prepare=lambda recipe: make_centralised(recipe, tier, options.fraction))
    name = f"{choice.config.recipe}-{tier}-{choice.config.data.fraction:g}"
    return train_seeds(spread_over_seeds(choice, options), options, name)
