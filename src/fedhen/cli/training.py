"""Shared by the commands that train: jobs, their folders, and the result of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedhen.cli.options import RUNS, Choice
from fedhen.cli.own_parts import fits_devices, load_own_parts
from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.distributed.communicator import current_ranks
from fedhen.errors import UserError
from fedhen.interrupts import RunStopped, stop_after_round, stop_ranks_after_round
from fedhen.runs.folders import create_fresh_folder, create_run_folders, find_config, reopen_run_folders
from fedhen.runs.layout import reported_owner
from fedhen.runs.reader import read_run
from fedhen.runs.records import ACCURACY, MetricInfo, Summary
from fedhen.tracking.console import make_display

if TYPE_CHECKING:
    from fedhen.algorithm.methods import Method
    from fedhen.tasks import Task

METHODS_HELP = "fedhen, noside, decouple, side-apart, heterofl, fedavg, or your own as file.py:NAME"
COMBINED = """\

Any method can be combined with any --local (plain, fedprox, scaffold, feddyn), with any tiers, and with a nest by
depth, by width or by both (--set model.nesting=width). Methods that sum over exits can be combined with exit weights
(--set objective.exit_weights.simple=0.5) and distillation (--set objective.distillation=0.1). heterofl sets a nest by
width.
"""


class Job(NamedTuple):
    """A configuration to train."""

    name: str
    folder: str
    """The name of its folder below the parent folder of all jobs; "" is the parent itself."""
    config: Config
    method: Method


def train_all(jobs: Sequence[Job], options: argparse.Namespace, folders: Callable[[], Iterable[Path]]) -> int:
    """Trains every job into its folder and returns the number of rounds that were played.

    `folders` creates the folders. It is called on rank 0 only, after all jobs are checked.
    """
    from fedhen.distributed import process_group
    from fedhen.experiment.build import build_populations, start_experiment
    from fedhen.experiment.resume import ResumePolicy
    from fedhen.experiment.runner import play_run
    from fedhen.hardware.accelerator import choose_device

    ranks = process_group.join(choose_device(options.accelerator))
    chosen = [(job.config, job.method) for job in jobs]
    own = load_own_parts(options)
    populations = list(build_populations(chosen, options.accelerator, options.data_dir, own, fits_devices(options)))
    places = (folder for make in [folders] for folder in make())
    policy, played = ResumePolicy(resume=options.resume, restart=getattr(options, "restart", False)), 0
    # All jobs of a command have the same task.
    metric = next((primary_metric(population.task) for population in populations), ACCURACY)
    shown = make_display({job.name: job.config.rounds for job in jobs}, metric, options.quiet or ranks.rank > 0)
    several = ranks.number > 1
    interrupts = stop_ranks_after_round(ranks.rank, process_group.has_lost) if several else stop_after_round()
    with shown, interrupts as stop:
        for job, population in zip(jobs, populations, strict=True):
            # Experiments are started one by one, because each holds the last models of all its devices.
            experiment = start_experiment(population, ranks=ranks)
            folder = Path(ranks.first(lambda: str(next(places))))
            try:
                for step in play_run(folder, experiment, policy, stop):
                    shown.show(job.name, step.record, step.timing)
                    played += 1
            except RunStopped as stopped:
                rest = f"; the same command with --resume resumes all runs in {folder.parent}" if len(jobs) > 1 else ""
                raise RunStopped(stopped.signal, f"{stopped}{rest}", stopped.abandoned) from None
            del experiment
    return played


def train_below(jobs: Sequence[Job], options: argparse.Namespace, name: str) -> list[Path]:
    """Trains the jobs into --out, or into a fresh folder of that name under runs/."""
    created: list[Path] = []

    def folders() -> list[Path]:
        names = [job.folder for job in jobs]
        if options.resume:
            created.extend(reopen_run_folders(options.out or RUNS / name, names))
        else:
            created.extend(create_run_folders(options.out or create_fresh_folder(RUNS, name), names, options.force))
        return created

    if options.resume and options.force:
        raise UserError("--resume continues what --force would replace: leave out one of them")
    train_all(jobs, options, folders)
    return created


def train_seeds(choices: Sequence[Choice], options: argparse.Namespace, name: str) -> int:
    """Trains one configuration with each seed, and prints the result of each run."""
    several = len(choices) > 1
    jobs = [
        Job(f"{c.method} seed {c.seed}" if several else c.method, f"seed{c.seed}" if several else "", c, method)
        for c, method in choices
    ]
    folders = train_below(jobs, options, name if several else f"{name}-seed{choices[0].config.seed}")
    if not current_ranks().rank:
        print("\n".join(describe_result(folder) for folder in folders))
    return 0


def name_run(config: Config) -> str:
    """Returns the name of a run: recipe, method, and the local variant unless it is plain."""
    local = f"-{config.local.name}" if config.local.name != "plain" else ""
    return f"{config.recipe}-{config.method}{local}"


def read_planned_config(folder: Path, rounds: int | None) -> Config:
    """Returns the configuration of a run, with the given rounds, if any. Rounds can be added but not removed."""
    config = toml.read_toml(find_config(folder))
    if rounds is not None and rounds < config.rounds:
        raise UserError(f"{folder} was planned for {config.rounds} rounds; rounds can be added but not removed")
    return config if rounds is None else replace(config, rounds=rounds)


def primary_metric(task: Task) -> MetricInfo:
    from fedhen.tasks.registry import describe_metrics

    return MetricInfo(**describe_metrics(task)[0])


def describe_result(folder: Path) -> str:
    """Returns the result of a run in a few lines."""
    run = read_run(folder)
    summary = run.summary or Summary({})
    final = summary.final
    owner = reported_owner(final) if final else ""
    whose = ", server's model" if owner == "server" else ""
    lines = [f"{tier:10} {describe_score(run.metric, x)}{whose}" for tier, x in final.get(owner, {}).items()]
    dropped = [f"{summary.dropped} devices were dropped for weights that are not finite"] * bool(summary.dropped)
    failed = [f"{summary.failed} devices failed and were left out: {folder}/errors.jsonl"] * bool(summary.failed)
    late = [f"{summary.late} answers were late and were left out"] * bool(summary.late)
    return "\n".join([*lines, *dropped, *failed, *late, f"run: {folder}"])


def describe_score(metric: MetricInfo, value: float | None) -> str:
    # 84.4 % of the test set; perplexity 5.52 on the test set
    shown = metric.format(value)
    return f"{shown} of the test set" if metric == ACCURACY else f"{metric.name} {shown} on the test set"
