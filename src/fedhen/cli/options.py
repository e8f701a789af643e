"""Options that several commands share, and the configuration that they ask for."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhen.cli.user_files import add_own_parts, find_files, find_reference, name_own_parts, prepare_own_parts
from fedhen.config import toml
from fedhen.config.personal_settings import PersonalConfig
from fedhen.config.recipes import RECIPES, load_recipe, take_data
from fedhen.config.runtime_settings import ACCELERATORS
from fedhen.config.settings import Config
from fedhen.config.training_settings import LocalConfig
from fedhen.config.validation import from_mapping, type_hints
from fedhen.errors import ConfigError, unknown_name
from fedhen.tracking.trackers import TRACKERS

if TYPE_CHECKING:
    from fedhen.algorithm.methods import Method
    from fedhen.experiment.choices import Choice

DATA_HELP = (
    "your own data: a folder with train/CLASS/*.png and test/CLASS/*.png, an .npz file, a .csv or .parquet table, or "
    "FILE.py:NAME"
)
LOCALS = typing.get_args(type_hints(LocalConfig)["name"])
PERSONALS = typing.get_args(type_hints(PersonalConfig)["name"])


def add_recipe(command: argparse.ArgumentParser, default: str | None = None) -> None:
    """Adds the recipe, or a file in its place, and changes of settings."""
    note = f" (default: {default})" if default else ""
    command.add_argument("recipe", nargs="?", metavar="RECIPE", help=f"one of: {', '.join(RECIPES)}{note}")
    command.add_argument(
        "--config", type=Path, metavar="FILE.toml", help="take recipe, method and settings from a file"
    )
    add_settings(command)


def add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="change a setting, like training.lr=0.05; `fedhen recipes NAME` lists them; may be repeated",
    )


def add_rounds(command: argparse.ArgumentParser) -> None:
    command.add_argument("--rounds", type=int, metavar="N", help="communication rounds")


def add_data_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="folder of downloaded data (default: $FEDHEN_DATA)"
    )


def add_machine(command: argparse.ArgumentParser) -> None:
    """Adds the hardware, the data folder, and whether to show progress."""
    command.add_argument(
        "--accelerator", choices=ACCELERATORS, default="auto", help="where to compute (default: %(default)s)"
    )
    add_data_dir(command)
    command.add_argument("--quiet", action="store_true", help="show no progress")


def add_tracking(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--track",
        action="append",
        default=[],
        metavar="TRACKER",
        help=f"log to {', '.join(TRACKERS)}; several are separated by commas",
    )


def add_method_options(command: argparse.ArgumentParser) -> None:
    """Adds the options that can be combined with any method."""
    command.add_argument("--local", metavar="L", help=f"local variant: {', '.join(LOCALS)} (default: plain)")
    command.add_argument(
        "--personal", metavar="P", help=f"what makes models personal: {', '.join(PERSONALS)} (default: none)"
    )
    command.add_argument(
        "--tier", metavar="TIER", help="give every device this tier (default with fedavg: the largest)"
    )


def add_training_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of the commands that train: data, rounds, seeds, run folder and machine."""
    command.add_argument("--data", metavar="PATH", help=DATA_HELP)
    add_own_parts(command)
    add_rounds(command)
    add_stop(command)
    seeds = command.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, metavar="S", help="the seed of all random numbers")
    seeds.add_argument("--seeds", metavar="S,S", help="one run for each seed; tables then give mean ± deviation")
    add_run_dir(command)
    command.add_argument("--overwrite", action="store_true", help="replace the run in --run-dir")
    command.add_argument("--force", action="store_true", dest="overwrite", help=argparse.SUPPRESS)  # its old name
    add_resume(command, "--run-dir")
    add_machine(command)
    add_tracking(command)


def add_stop(command: argparse.ArgumentParser) -> None:
    """Adds the options that stop a run before its last round."""
    command.add_argument(
        "--until",
        metavar="TIER=X,...",
        help="stop when all these values of the primary metric are reached, like simple=90,complex=88; none: no "
        "targets",
    )
    command.add_argument(
        "--patience", type=int, metavar="N", help="stop after N evaluations in a row that improve no tier; 0: never"
    )


def parse_stop(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of [stop] that the options give."""
    until, patience = getattr(options, "until", None), getattr(options, "patience", None)
    found: dict[str, Any] = {} if patience is None else {"patience": patience}
    if until is not None:
        pairs = [] if until == "none" else [pair.partition("=") for pair in until.split(",")]
        try:
            found["until"] = {tier.strip(): float(value) for tier, _, value in pairs}
        except ValueError:
            raise ConfigError(f"--until {until!r}: write it like simple=90,complex=88, or none") from None
    return found


def add_run_dir(command: argparse.ArgumentParser) -> None:
    """Adds the run folder, and its old name."""
    command.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where to write (default: a fresh folder under runs/)"
    )
    command.add_argument("--out", type=Path, dest="run_dir", help=argparse.SUPPRESS)


def add_resume(command: argparse.ArgumentParser, where: str) -> None:
    command.add_argument(
        "--resume",
        action="store_true",
        help=f"resume the unfinished runs in {where}, skip the finished ones, start the missing ones",
    )


def choose(
    options: argparse.Namespace,
    default: str | None = None,
    method: str | None = None,
    prepare: Callable[[Config], Config] = lambda recipe: recipe,
) -> Choice:
    """Returns the configuration that the options ask for, and its method, whose file is executed once.

    A setting comes from --set or another option if it is given there, else from the named method, else from --config,
    else from the recipe.
    """
    from fedhen.experiment.choices import Choice

    config, load = config_from_options(options, default, method, prepare), method_loader(options)
    chosen = load(config.method_file or config.method)
    return Choice(chosen.keep_tiers(config), chosen)


def method_loader(options: argparse.Namespace) -> Callable[[str], Method]:
    """Returns a function that loads a method by name or from a file, which is executed once."""
    from fedhen.algorithm.methods import load_method

    return partial(load_method, files=find_files(options))


def choose_one(options: argparse.Namespace, default: str | None = None) -> Choice:
    """Does the same as `choose` for a command with --method, which cannot be combined with --config."""
    if options.method is not None and options.config is not None:
        raise ConfigError("--config brings its own method: leave out --method")
    return choose(options, default, options.method)


def config_from_options(
    options: argparse.Namespace,
    default: str | None = None,
    method: str | None = None,
    prepare: Callable[[Config], Config] = lambda recipe: recipe,
) -> Config:
    """Returns only the configuration, with all tiers of its recipe."""
    from fedhen.experiment.choices import configure

    if options.config is not None and options.recipe is not None:
        raise ConfigError(f"--config brings its own recipe: leave out {options.recipe!r}")
    # A family and data of one's own are a whole experiment.
    is_own = bool(getattr(options, "data", None) and find_reference(options, "family"))
    recipe = options.recipe or (None if is_own else default)
    family = getattr(options, "family", None)
    if family is not None and family.endswith(".py"):
        raise ConfigError(f"--family {family}: name what it holds too, as {family}:NAME")
    if options.config is None and recipe is None and not is_own:
        raise ConfigError(
            f"which recipe? choose from {', '.join(RECIPES)}, or give --config FILE.toml, or --family and --data"
        )

    source = options.config or (Config() if recipe is None else load_recipe(recipe))
    return configure(
        source,
        method,
        partial(apply_options, options=options),
        start=partial(prepare_own_parts, options=options),
        prepare=prepare,
        load=method_loader(options),
    )


def apply_options(config: Config, options: argparse.Namespace) -> Config:
    """Returns the configuration with the changes that the options make."""
    if getattr(options, "data", None) is not None:
        config = take_data(config, Path(options.data))
    config = name_own_parts(toml.apply_settings(config, options.settings), options)
    given = {name: getattr(options, name, None) for name in ("rounds", "seed")}
    named = {section: getattr(options, section, None) for section in ("local", "personal")}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    changes |= {section: {"name": name} for section, name in named.items() if name is not None}
    changes |= {"stop": parse_stop(options)}
    config = from_mapping(changes, config)
    return _of_one_tier(config, getattr(options, "tier", None))


def _of_one_tier(config: Config, tier: str | None) -> Config:
    if tier is None:
        return config
    known = config.model.rates if config.model.nesting == "width" else config.model.exits
    if tier not in known:
        raise unknown_name("tier", tier, known)
    return config.with_tiers({tier: 1.0})


def parse_seeds(options: argparse.Namespace) -> list[int] | None:
    """Returns the seeds of --seeds, or None."""
    if options.seeds is None:
        return None
    try:
        seeds = [int(text) for text in options.seeds.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {options.seeds!r}: write whole numbers separated by commas, like 0,1,2") from None
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"--seeds {options.seeds!r}: name each seed once, none below 0")
    return seeds


def spread_over_seeds(choice: Choice, options: argparse.Namespace) -> list[Choice]:
    """Returns one choice for each seed of --seeds."""
    seeds = parse_seeds(options)
    if seeds is None:
        return [choice]
    return [choice._replace(config=replace(choice.config, seed=seed)) for seed in seeds]
