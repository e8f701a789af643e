"""`fedhen paper`: makes the paper's tables and figures from run folders, and trains the runs that are missing."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhen.cli.options import add_machine, add_resume, add_rounds, add_settings, apply_options
from fedhen.cli.report import print_note
from fedhen.cli.training import train_all
from fedhen.config.recipes import load_recipe, make_centralised
from fedhen.distributed.communicator import current_ranks
from fedhen.errors import ConfigError, unknown_name
from fedhen.reports.paper.report import CENTRALISED, PAPER_RUNS, has_finished_run, write_paper
from fedhen.runs.folders import create_fresh_folder, list_run_folders, reopen_run_folders
from fedhen.runs.layout import MODEL_OWNERS, RUNS
from fedhen.runs.reader import Run, read_readable

if TYPE_CHECKING:
    from fedhen.experiment.choices import Job

FLEET = ("devices", "tiers", "split", "server", "local", "objective")

EXAMPLES = """\
examples:
  fedhen paper                             tables and figures of the runs under runs/, with the paper's values
  fedhen paper --runs results --out docs/paper
  fedhen paper --run                       train all missing runs: 12 of 1000 rounds and 8 centralised ones
  fedhen paper --run --only cifar10-iid    train the missing runs of one recipe
"""


def add_commands(commands: Any) -> None:
    paper = commands.add_parser(
        "paper",
        help="make the paper's tables and figures from run folders",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    paper.add_argument(
        "--runs", type=Path, metavar="DIR", default=RUNS, help="where the runs are (default: %(default)s)"
    )
    paper.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: DIR/paper)")
    paper.add_argument(
        "--of",
        choices=MODEL_OWNERS,
        help="whose models: the average of all devices (default, if all runs keep it), or the server's",
    )
    paper.add_argument("--run", action="store_true", dest="train", help="first train the missing runs, into --runs")
    paper.add_argument("--only", metavar="R,R", help=f"with --run, only these: {', '.join(_experiments())}")
    paper.add_argument("--seed", type=int, metavar="S", help="with --run, the seed of the runs")
    add_settings(paper)
    add_rounds(paper)
    add_machine(paper)
    add_resume(paper, "--runs")
    paper.set_defaults(run=paper_command)


def paper_command(options: argparse.Namespace) -> int:
    wanted = _wanted(options.only)
    if options.train:
        jobs = plan_missing(wanted, options)
        if options.resume:
            train_all(jobs, options, lambda: reopen_run_folders(options.runs, [job.folder for job in jobs]))
        else:
            train_all(jobs, options, lambda: (create_fresh_folder(options.runs, job.folder) for job in jobs))
    elif options.only or options.seed is not None or options.rounds or options.settings or options.resume:
        raise ConfigError("--only, --seed, --rounds, --set and --resume need --run")
    elif not options.runs.is_dir():
        raise ConfigError(
            f"{options.runs} does not exist: name the folder of your runs with --runs, or train with --run"
        )
    if current_ranks().rank:
        return 0
    out = options.out or options.runs / "paper"
    report = write_paper(find_runs(options.runs), out, owner=options.of)
    print(report.text)
    print(f"page: {report.paths[0]}")
    return 0


def plan_missing(wanted: Sequence[str], options: argparse.Namespace) -> list[Job]:
    """Returns the jobs whose runs are missing in the folders of rank 0, which other ranks may not see."""
    from fedhen.distributed import process_group
    from fedhen.hardware.accelerator import choose_device

    ranks = process_group.join(choose_device(options.accelerator))
    names = ranks.first(lambda: [job.name for job in missing_jobs(find_runs(options.runs), wanted, options)])
    return [job for job in missing_jobs([], wanted, options) if job.name in names]


def find_runs(folder: Path) -> list[Run]:
    """Reads the runs below a folder. Skips those that cannot be read, with a message."""
    runs, errors = read_readable(list_run_folders(folder))
    for error in errors:
        print_note(f"skipped: {error}")
    return runs


def missing_jobs(runs: Sequence[Run], wanted: Sequence[str], options: argparse.Namespace) -> Iterator[Job]:
    """Yields the wanted jobs that have no finished run."""
    from fedhen.algorithm.methods import load_method
    from fedhen.experiment.choices import Job

    for recipe, method in PAPER_RUNS:
        config = replace(apply_options(load_recipe(recipe), options), method=method)
        if recipe in wanted and not has_finished_run(runs, config):
            yield Job(f"{recipe} {method}", f"{recipe}-{method}-seed{config.seed}", config, load_method(method))
    centralised = copy.copy(options)
    # A single device holds all the data, so settings of the fleet do not apply.
    centralised.settings = [text for text in options.settings if text.split(".")[0] not in FLEET]
    for data, tier, fraction in CENTRALISED:
        config = apply_options(make_centralised(load_recipe(f"{data}-iid"), tier, fraction), centralised)
        name = f"{config.recipe}-{tier}-{fraction:g}"
        if config.recipe in wanted and not has_finished_run(runs, config):
            yield Job(name, f"{name}-seed{config.seed}", config, load_method(config.method))


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
            raise unknown_name("experiment", name, _experiments())
    return names
