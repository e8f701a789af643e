"""Options that several commands share, and what they ask for."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fedhen import toml
from fedhen.config import ACCELERATORS, Config
from fedhen.errors import UserError
from fedhen.recipes import RECIPES, config_file, recipe_named

RUNS = Path("runs")


def add_recipe(command: argparse.ArgumentParser, default: str | None = None) -> None:
    """The recipe, or a file, and changes to it."""
    note = f" (default: {default})" if default else ""
    command.add_argument("recipe", nargs="?", metavar="RECIPE", help=f"one of: {', '.join(RECIPES)}{note}")
    command.add_argument(
        "--config", type=Path, metavar="FILE.toml", help="take recipe, method and settings from a file"
    )
    add_settings(command)


def add_settings(command: argparse.ArgumentParser) -> None:
    """Changes to a configuration."""
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="change a setting, like training.lr=0.05; `fedhen recipes NAME` lists them; may be repeated",
    )


def add_rounds(command: argparse.ArgumentParser) -> None:
    """How long to train."""
    command.add_argument("--rounds", type=int, metavar="N", help="communication rounds")


def add_seeds(command: argparse.ArgumentParser) -> None:
    """One seed, or several."""
    seeds = command.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, metavar="S", help="every random number follows from it")
    seeds.add_argument("--seeds", metavar="S,S", help="one run for each of these; tables then give mean ± deviation")


def add_machine(command: argparse.ArgumentParser) -> None:
    """Where to train, where the data lies, and what to show."""
    command.add_argument("--accelerator", choices=ACCELERATORS, default="auto", help="default: %(default)s")
    command.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where downloaded data lies (default: $FEDHEN_DATA)"
    )
    command.add_argument("--quiet", action="store_true", help="show no progress")


def add_out(command: argparse.ArgumentParser) -> None:
    """Where to write."""
    command.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: a fresh folder under runs/)")
    command.add_argument("--force", action="store_true", help="replace the run that --out holds")


def configured(options: argparse.Namespace, default: str | None = None) -> Config:
    """The configuration that the options ask for."""
    if options.config is not None:
        if options.recipe is not None:
            raise UserError(f"--config brings its own recipe: leave out {options.recipe!r}")
        return changed(config_file(options.config), options)
    recipe = options.recipe or default
    if recipe is None:
        raise UserError(f"which recipe? choose from {', '.join(RECIPES)}, or give --config FILE.toml")
    return changed(recipe_named(recipe), options)


def changed(config: Config, options: argparse.Namespace) -> Config:
    """The configuration with the options' changes."""
    if getattr(options, "data", None) is not None:
        # The path is part of the record, so that the run can be repeated from anywhere.
        config = replace(config, data=replace(config.data, name=str(options.data.resolve()), limit=0))
    given = {key: getattr(options, key, None) for key in ("rounds", "seed")}
    settings = [f"{key}={value}" for key, value in given.items() if value is not None]
    return toml.with_settings(config, [*options.settings, *settings])


def with_seeds(config: Config, options: argparse.Namespace) -> list[Config]:
    """One configuration for each seed that is asked for."""
    if options.seeds is None:
        return [config]
    try:
        seeds = [int(text) for text in options.seeds.split(",")]
    except ValueError:
        raise UserError(f"--seeds {options.seeds!r}: write whole numbers with commas, like 0,1,2") from None
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise UserError(f"--seeds {options.seeds!r}: name each seed once, none below 0")
    return [replace(config, seed=seed) for seed in seeds]
