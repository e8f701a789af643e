"""`fedhen paper`: the paper's tables and figures from the run folders at hand, and the runs that are missing."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhen.cli.options import RUNS, add_machine, add_rounds, add_settings, changed
from fedhen.cli.training import Job, train_all
from fedhen.errors import UserError, unknown
from fedhen.recipes import centralised, recipe_named
from fedhen.records import CONFIG, KINDS, Run, read_run
from fedhen.reports.paper import CENTRALISED, PAPER_RUNS, missing, missing_centralised, write_paper

DEPTH = 3
"""How far below --runs run folders are looked for."""

EXAMPLES = """\
examples:
  fedhen paper                             what is there under runs/, beside the paper's values
  fedhen paper --runs results --out docs/paper
  fedhen paper --run                       run all that is missing: 12 runs of 1000 rounds and 8 centralised ones
  fedhen paper --run --only cifar10-iid    run what is missing of one recipe
"""


def add_commands(commands: Any) -> None:
    """Add it to the parser."""
    paper = commands.add_parser(
        "paper",
        help="the paper's tables and figures from the runs at hand",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    paper.add_argument(
        "--runs", type=Path, metavar="DIR", default=RUNS, help="where the runs are (default: %(default)s)"
    )
    paper.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: DIR/paper)")
    paper.add_argument(
        "--of", choices=KINDS, default=KINDS[0], help="whose models: all devices' average, or the server's"
    )
    paper.add_argument("--run", action="store_true", dest="train", help="run what is missing, into --runs")
    paper.add_argument("--only", metavar="R,R", help=f"with --run, only these: {', '.join(_experiments())}")
    paper.add_argument("--seed", type=int, metavar="S", help="with --run, the seed of the runs")
    add_settings(paper)
    add_rounds(paper)
    add_machine(paper)
    paper.set_defaults(run=paper_command, force=False)


def paper_command(options: argparse.Namespace) -> int:
    """`fedhen paper`."""
    wanted = _wanted(options.only)
    if options.train:
        jobs = list(missing_jobs(found_runs(options.runs), wanted, options))
        options.force = True  # names are chosen so that nothing is replaced
        if jobs:
            train_all(jobs, options, lambda: options.runs)
    elif not options.runs.is_dir():
        raise UserError(f"{options.runs} does not exist: name the folder of your runs with --runs, or train with --run")
    out = options.out or options.runs / "paper"
    report = write_paper(found_runs(options.runs), out, kind=options.of)
    print(report.text)
    print(f"page: {report.paths[0]}")
    return 0


def found_runs(folder: Path) -> list[Run]:
    """Every run below a folder that can be read; one that cannot is named and passed over."""
    runs = []
    for path in sorted(p for depth in range(DEPTH + 1) for p in folder.glob("*/" * depth + CONFIG)):
        try:
            runs.append(read_run(path.parent))
        except UserError as error:
            print(f"passed over: {error}")
    return runs


def missing_jobs(runs: Sequence[Run], wanted: Sequence[str], options: argparse.Namespace) -> Iterator[Job]:
    """What is still to be trained."""
    own = bool(options.settings or options.rounds)  # then runs with such changes are what is asked for
    for recipe, method in missing(runs, changed=own):
        if recipe in wanted:
            config = replace(changed(recipe_named(recipe), options), method=method)
            yield Job(f"{recipe} {method}", _free(options.runs, f"{recipe}-{method}-seed{config.seed}"), config)
    for data, tier, fraction in missing_centralised(runs, changed=own):
        if f"{data}-centralised" in wanted:
            config = changed(centralised(recipe_named(f"{data}-iid"), tier, fraction), options)
            name = f"{config.recipe}-{tier}-{fraction:g}"
            yield Job(name, _free(options.runs, f"{name}-seed{config.seed}"), config)


def _free(parent: Path, name: str) -> str:
    """That name, or the first with a number behind it that is not taken by an unfinished run."""
    names = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(name for name in names if not (parent / name).exists())


def _experiments() -> list[str]:
    return [
        *dict.fromkeys(recipe for recipe, _ in PAPER_RUNS),
        *dict.fromkeys(f"{c[0]}-centralised" for c in CENTRALISED),
    ]


def _wanted(only: str | None) -> list[str]:
    if only is None:
        return _experiments()
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in _experiments():
            raise unknown("experiment", name, _experiments())
    return names
