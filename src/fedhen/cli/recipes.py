"""`fedhen recipes`."""

from __future__ import annotations

import argparse
from typing import Any

from fedhen.config import toml
from fedhen.config.recipes import RECIPES, load_recipe


def add_commands(commands: Any) -> None:
    command = commands.add_parser("recipes", help="list the recipes, or print one as TOML")
    command.add_argument(
        "name", nargs="?", metavar="RECIPE", help="print this recipe, with the meaning of every setting"
    )
    command.set_defaults(run=recipes_command)


def recipes_command(options: argparse.Namespace) -> int:
    if options.name is not None:
        print(toml.to_toml(load_recipe(options.name), comments=True), end="")
        return 0
    for name, recipe in RECIPES.items():
        print(f"{name:18}{(recipe.__doc__ or '').splitlines()[0]}")
    return 0
