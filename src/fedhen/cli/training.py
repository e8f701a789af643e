"""`fedhen run` and `fedhen compare`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhen import toml
from fedhen.config import Config
from fedhen.errors import UserError
from fedhen.progress import display
from fedhen.recipes import RECIPES, recipe_named
from fedhen.records import fresh_folder, prepare_folder, read_run
from fedhen.reports import write_report

PAPERS_METHODS = ("fedhen", "noside", "decouple")
RUNS = Path("runs")

RUN_EXAMPLES = """\
examples:
  fedhen run digits --method fedhen
  fedhen run digits --method noside --seed 1 --set training.lr=0.05 --set split.kind=iid
  fedhen run --config runs/digits-fedhen-seed0/config.toml     repeats that run exactly

The run folder holds config.toml, rounds.jsonl, timing.jsonl, summary.json and models/*.safetensors.
"""
COMPARE_EXAMPLES = """\
examples:
  fedhen compare
  fedhen compare digits --rounds 20 --seed 3 --out my-comparison
  fedhen compare --config my.toml --methods fedhen,noside
"""


def add_commands(commands: Any) -> None:
    """Add both to the parser."""
    look = argparse.RawDescriptionHelpFormatter
    run = commands.add_parser("run", help="one run of a method on a recipe", epilog=RUN_EXAMPLES, formatter_class=look)
    run.add_argument("recipe", nargs="?", metavar="RECIPE", help=f"one of: {', '.join(RECIPES)}")
    run.add_argument("--method", metavar="M", help=f"{', '.join(PAPERS_METHODS)} (default: the recipe's, fedhen)")
    run.set_defaults(run=run_command)
    compare = commands.add_parser(
        "compare", help="run the methods side by side, then the report", epilog=COMPARE_EXAMPLES, formatter_class=look
    )
    compare.add_argument("recipe", nargs="?", metavar="RECIPE", help=f"one of: {', '.join(RECIPES)} (default: digits)")
    compare.add_argument(
        "--methods",
        metavar="M,M",
        default=",".join(PAPERS_METHODS),
        help="which, separated by commas (default: %(default)s)",
    )
    compare.set_defaults(run=compare_command)
    for command in (run, compare):
        _add_options(command)


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--rounds", type=int, metavar="N", help="communication rounds")
    command.add_argument("--seed", type=int, metavar="S", help="every random number follows from it")
    command.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: a fresh folder under runs/)")
    command.add_argument("--force", action="store_true", help="replace the run that --out holds")
    command.add_argument("--accelerator", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    command.add_argument(
        "--config", type=Path, metavar="FILE.toml", help="take recipe, method and settings from a file"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="change a setting, like training.lr=0.05; `fedhen recipes NAME` lists them; may be repeated",
    )
    command.add_argument("--quiet", action="store_true", help="show no progress")


def configured(options: argparse.Namespace, default_recipe: str | None) -> Config:
    """The configuration that the options ask for."""
    if options.config is not None:
        if options.recipe is not None:
            raise UserError(f"--config brings its own recipe: leave out {options.recipe!r}")
        config = toml.read_toml(options.config)
    else:
        recipe = options.recipe or default_recipe
        if recipe is None:
            raise UserError(f"which recipe? choose from {', '.join(RECIPES)}, or give --config FILE.toml")
        config = recipe_named(recipe)
    changes = {key: getattr(options, key) for key in ("rounds", "seed") if getattr(options, key) is not None}
    return toml.with_settings(config, [*options.settings, *(f"{key}={value}" for key, value in changes.items())])


def run_command(options: argparse.Namespace) -> int:
    """`fedhen run`."""
    config = configured(options, default_recipe=None)
    if options.method is not None:
        if options.config is not None:
            raise UserError("--config brings its own method: leave out --method")
        config = replace(config, method=options.method)
    name = f"{config.recipe}-{config.method}-seed{config.seed}"
    folder = options.out or fresh_folder(RUNS, name)
    train_into({config.method: folder}, {config.method: config}, options)
    print(_result(folder))
    return 0


def compare_command(options: argparse.Namespace) -> int:
    """`fedhen compare`."""
    config = configured(options, default_recipe="digits")
    methods = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not methods or len(set(methods)) < len(methods):
        raise UserError(f"--methods {options.methods!r}: name each method once, like {','.join(PAPERS_METHODS)}")
    parent = options.out or fresh_folder(RUNS, f"{config.recipe}-compare")
    folders = {method: parent / method for method in methods}
    train_into(folders, {method: replace(config, method=method) for method in methods}, options)
    report = write_report([read_run(folder) for folder in folders.values()], parent)
    print(report.text)
    print(f"page: {parent / 'report.html'}")
    return 0


def train_into(folders: Mapping[str, Path], configs: Mapping[str, Config], options: argparse.Namespace) -> None:
    """Train every configuration into its folder; what is wrong with any of them is found before the first starts."""
    from fedhen.experiment import assemble, play_into

    experiments = {name: assemble(config, accelerator=options.accelerator) for name, config in configs.items()}
    for folder in folders.values():
        prepare_folder(folder, options.force)
    rounds = max(config.rounds for config in configs.values())
    with display(list(configs), rounds, options.quiet) as shown:
        for name, folder in folders.items():
            for step in play_into(folder, experiments[name]):
                shown.show(name, step.record, step.timing)


def _result(folder: Path) -> str:
    summary = read_run(folder).summary or {}
    lines = [f"{tier:10} {100 * x:.1f} % of the test set" for tier, x in summary["final"]["devices"].items()]
    dropped = [f"{summary['dropped']} devices were dropped for weights that are not finite"] * bool(summary["dropped"])
    return "\n".join([*lines, *dropped, f"run: {folder}"])
