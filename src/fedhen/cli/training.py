"""`fedhen run`, `fedhen compare` and `fedhen centralised`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhen.cli.options import (
    RUNS,
    add_machine,
    add_method_options,
    add_out,
    add_recipe,
    add_rounds,
    add_seeds,
    config_from_options,
    keep_method_tiers,
    spread_over_seeds,
)
from fedhen.cli.stopping import handle_interrupts
from fedhen.config.recipes import make_centralised
from fedhen.config.settings import Config
from fedhen.distributed.communicator import current_ranks
from fedhen.errors import RunStopped, UserError
from fedhen.reports import write_report
from fedhen.runs.folders import create_fresh_folder, create_run_folders, reopen_run_folders
from fedhen.runs.layout import reported_owner
from fedhen.runs.reader import read_run
from fedhen.runs.records import Summary
from fedhen.tracking.console import make_display

PAPERS_METHODS = ("fedhen", "noside", "decouple")

RUN_EXAMPLES = """\
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
COMPARE_EXAMPLES = """\
examples:
  fedhen compare
  fedhen compare digits --rounds 20 --seeds 0,1,2 --out my-comparison
  fedhen compare --config my.toml --methods fedhen,noside
  fedhen compare digits --methods fedhen,noside,decouple,heterofl --local feddyn
"""
CENTRALISED_EXAMPLES = """\
A round is an epoch: SGD with momentum 0.9, batches of 128, weight decay 0.0005, a learning rate of 0.1 that rises over
the first 5 of 100 epochs and falls to 0 along a cosine; augmentation and clip as in the recipe.

examples:
  fedhen centralised cifar10-iid --tier complex
  fedhen centralised cifar10-iid --tier simple --fraction 0.5      on the data of half of the devices
"""
METHODS_HELP = "fedhen, noside, decouple, side-apart, heterofl, fedavg, or your own as file.py:NAME"
COMBINED = """\

What can be combined: any method with any --local (plain, fedprox, scaffold, feddyn) on any tiers; a nest by depth, by
width or by both (--set model.nesting=width); exit weights and distillation (--set objective.weights.simple=0.5,
--set objective.distillation=0.1) with methods that sum over exits. heterofl brings its width nest along.
"""
DATA_HELP = "your own data: a folder with train/CLASS/*.png and test/CLASS/*.png, or an .npz file"


@dataclass(frozen=True)
class Job:
    """A configuration to train."""

    name: str
    folder: str
    """Below the place for all of them; "" is that place itself."""
    config: Config


def add_commands(commands: Any) -> None:
    """Add them to the parser."""
    look = argparse.RawDescriptionHelpFormatter
    run = commands.add_parser(
        "run", help="one run of a method on a recipe", epilog=RUN_EXAMPLES + COMBINED, formatter_class=look
    )
    run.add_argument("--method", metavar="M", help=f"{METHODS_HELP} (default: the recipe's, fedhen)")
    run.set_defaults(run=run_command)
    compare = commands.add_parser(
        "compare",
        help="run the methods side by side, then the report",
        epilog=COMPARE_EXAMPLES + COMBINED,
        formatter_class=look,
    )
    everyone = ",".join(PAPERS_METHODS)
    compare.add_argument(
        "--methods", metavar="M,M", default=everyone, help=f"which, with commas: {METHODS_HELP} (default: %(default)s)"
    )
    compare.set_defaults(run=compare_command)
    alone = commands.add_parser(
        "centralised",
        help="the upper reference: one device of a tier that holds all the data",
        epilog=CENTRALISED_EXAMPLES,
        formatter_class=look,
    )
    alone.add_argument("--tier", metavar="TIER", required=True, help="which of the recipe's tiers")
    alone.add_argument(
        "--fraction", type=float, metavar="X", default=1.0, help="share of the data (default: all of it)"
    )
    alone.set_defaults(run=centralised_command)
    for command in (run, compare, alone):
        add_recipe(command, "digits" if command is compare else None)
        command.add_argument("--data", type=Path, metavar="PATH", help=DATA_HELP)
        add_rounds(command)
        add_seeds(command)
        if command is not alone:
            add_method_options(command)
        add_out(command)
        add_machine(command)


def run_command(options: argparse.Namespace) -> int:
    """`fedhen run`."""
    if options.method is not None and options.config is not None:
        raise UserError("--config brings its own method: leave out --method")
    config = keep_method_tiers(config_from_options(options, method=options.method))
    local = f"-{config.local.name}" if config.local.name != "plain" else ""
    return _train(spread_over_seeds(config, options), f"{config.recipe}-{config.method}{local}", options)


def centralised_command(options: argparse.Namespace) -> int:
    """`fedhen centralised`."""
    if not 0 < options.fraction <= 1:
        raise UserError(f"--fraction {options.fraction:g}: it must be above 0 and at most 1")
    tier, options.tier = options.tier, None
    config = config_from_options(options, prepare=lambda recipe: make_centralised(recipe, tier, options.fraction))
    name = f"{config.recipe}-{tier}-{config.data.fraction:g}"
    return _train(spread_over_seeds(config, options), name, options)


def _train(configs: Sequence[Config], name: str, options: argparse.Namespace) -> int:
    """Train one configuration, with one seed or several, and say how it ended."""
    several = len(configs) > 1
    jobs = [
        Job(f"{c.method} seed {c.seed}" if several else c.method, f"seed{c.seed}" if several else "", c)
        for c in configs
    ]
    name = name if several else f"{name}-seed{configs[0].seed}"
    folders = train_below(jobs, options, name)
    if not current_ranks().rank:
        print("\n".join(describe_result(folder) for folder in folders))
    return 0


def compare_command(options: argparse.Namespace) -> int:
    """`fedhen compare`."""
    methods = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not methods or len(set(methods)) < len(methods):
        raise UserError(f"--methods {options.methods!r}: name each method once, like {','.join(PAPERS_METHODS)}")
    by_method = [keep_method_tiers(config_from_options(options, default="digits", method=name)) for name in methods]
    if len({config.method for config in by_method}) < len(by_method):
        raise UserError("two of the methods have the same name: give one of them another")
    configs = [config for each in by_method for config in spread_over_seeds(each, options)]
    several = options.seeds is not None
    jobs = []
    for config in sorted(configs, key=lambda config: config.seed):
        label = f"{config.method} seed {config.seed}" if several else config.method
        jobs.append(Job(label, label.replace(" seed ", "-seed"), config))
    folders = train_below(jobs, options, f"{configs[0].recipe}-compare")
    if current_ranks().rank:
        return 0
    # By name, as `fedhen report` finds them: the same columns, which are also the paper's.
    parent = folders[0].parent
    report = write_report([read_run(folder) for folder in sorted(folders)], parent)
    print(report.text)
    print(f"page: {parent / 'report.html'}")
    return 0


def train_all(jobs: Sequence[Job], options: argparse.Namespace, folders: Callable[[], Iterable[Path]]) -> int:
    """Train every job into its folder, which are asked for when all jobs are known to be right; rounds played."""
    from fedhen.distributed import process_group
    from fedhen.experiment.build import Assembler
    from fedhen.experiment.resume import ResumePolicy
    from fedhen.experiment.runner import play_run
    from fedhen.hardware.accelerator import choose_device

    ranks = process_group.join(choose_device(options.accelerator))
    assemble = Assembler(options.accelerator, options.data_dir, ranks)
    for job in jobs:
        assemble(job.config)
    # Rank 0 alone makes folders: nothing happens before the first is asked for.
    places = (folder for make in [folders] for folder in make())
    how, played = ResumePolicy(resume=options.resume, restart=getattr(options, "restart", False)), 0
    quiet = options.quiet or ranks.rank > 0
    with make_display({job.name: job.config.rounds for job in jobs}, quiet) as shown, handle_interrupts() as stop:
        for job in jobs:
            folder = Path(ranks.first(lambda: str(next(places))))
            # Each experiment is made when its turn comes: it holds every device's last model.
            try:
                for step in play_run(folder, assemble(job.config), how, stop):
                    shown.show(job.name, step.record, step.timing)
                    played += 1
            except RunStopped as told:
                rest = f"; the rest too: the same command with --resume, into {folder.parent}" if len(jobs) > 1 else ""
                raise RunStopped(told.signal, f"{told}{rest}", told.abandoned) from None
    return played


def train_below(jobs: Sequence[Job], options: argparse.Namespace, name: str) -> list[Path]:
    """Train the jobs into --out, or into a fresh folder of that name under runs/."""
    claimed: list[Path] = []

    def folders() -> list[Path]:
        names = [job.folder for job in jobs]
        if options.resume:
            claimed.extend(reopen_run_folders(options.out or RUNS / name, names))
        else:
            claimed.extend(create_run_folders(options.out or create_fresh_folder(RUNS, name), names, options.force))
        return claimed

    if options.resume and options.force:
        raise UserError("--resume goes on with what --force would replace: leave out one of them")
    train_all(jobs, options, folders)
    return claimed


def describe_result(folder: Path) -> str:
    """How a run ended."""
    summary = read_run(folder).summary or Summary({})
    final = summary.final
    kind = reported_owner(final) if final else ""
    whose = ", server's model" if kind == "server" else ""
    lines = [f"{tier:10} {100 * x:.1f} % of the test set{whose}" for tier, x in final.get(kind, {}).items()]
    dropped = [f"{summary.dropped} devices were dropped for weights that are not finite"] * bool(summary.dropped)
    failed = [f"{summary.failed} devices failed and were left out: {folder}/errors.jsonl"] * bool(summary.failed)
    late = [f"{summary.late} answers were late and were left out"] * bool(summary.late)
    return "\n".join([*lines, *dropped, *failed, *late, f"run: {folder}"])
