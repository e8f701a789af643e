"""Shared by the commands that train: jobs, their folders, and the result of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhen.cli.user_files import fits_devices, load_own_parts
from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.config.validation import from_mapping
from fedhen.distributed.communicator import current_ranks
from fedhen.errors import ConfigError, one_line
from fedhen.interrupts import RunStopped, stop_after_round, stop_ranks_after_round
from fedhen.reports.names import name_owner
from fedhen.runs.folders import create_fresh_folder, create_run_folders, find_config, reopen_run_folders
from fedhen.runs.layout import RUNS, reported_owner
from fedhen.runs.reader import Run, read_run
from fedhen.runs.records import ACCURACY, Summary
from fedhen.tracking.trackers import check_track

if TYPE_CHECKING:
    from fedhen.experiment.choices import Choice, Job

NO_CHANGES: Mapping[str, Any] = {}
METHODS = ("fedhen", "noside", "decouple", "side-apart", "heterofl", "fedavg")
"""The names of the methods, for commands that do without torch."""
METHODS_HELP = f"{', '.join(METHODS)}, or your own as file.py:NAME"
COMBINED = """\

Any method can be combined with any --local (plain, fedprox, scaffold, feddyn), with any --personal (finetune,
fedper, fedrep, fedbabu, ditto, perfedavg, proto), with any tiers, and with a nest by depth, by width or by both
(--set model.nesting=width). Methods that sum over exits can be combined with exit weights
(--set objective.exit_weights.simple=0.5) and distillation (--set objective.distillation=0.1). heterofl sets a nest by
width.
"""


def train_all(jobs: Sequence[Job], options: argparse.Namespace, folders: Callable[[], Iterable[Path]]) -> int:
    """Trains every job into its folder and returns the number of rounds that were played.

    `folders` creates the folders. It is called on rank 0 only, after all jobs are checked.
    """
    from fedhen.distributed import process_group
    from fedhen.experiment.prepared_runs import prepare_runs
    from fedhen.experiment.resume import ResumePolicy

    runs = prepare_runs(
        jobs,
        track=check_track(getattr(options, "track", []), "--track"),
        accelerator=options.accelerator,
        data_dir=options.data_dir,
        own=load_own_parts(options),
        fit=fits_devices(options),
    )
    policy, played = ResumePolicy(resume=options.resume, restart=getattr(options, "restart", False)), 0
    several, rank = runs.ranks.number > 1, runs.ranks.rank
    interrupts = stop_ranks_after_round(rank, process_group.has_lost) if several else stop_after_round()
    with runs.make_display(options.quiet) as shown, interrupts as stop:
        for play in runs.play(folders, shown, policy, stop):
            try:
                played += sum(1 for _ in play)
            except RunStopped as stopped:
                parent = play.folder and play.folder.parent
                rest = f"; the same command with --resume resumes all runs in {parent}" if len(jobs) > 1 else ""
                raise RunStopped(stopped.signal, f"{stopped}{rest}", stopped.abandoned) from None
            del play
    return played


def train_below(jobs: Sequence[Job], options: argparse.Namespace, name: str) -> list[Path]:
    """Trains the jobs into --run-dir, or into a fresh folder of that name under runs/."""
    created: list[Path] = []

    def folders() -> list[Path]:
        names = [job.folder for job in jobs]
        if options.resume:
            created.extend(reopen_run_folders(options.run_dir or RUNS / name, names))
        else:
            parent = options.run_dir or create_fresh_folder(RUNS, name)
            created.extend(create_run_folders(parent, names, options.overwrite))
        return created

    if options.resume and options.overwrite:
        raise ConfigError("--resume continues what --overwrite would replace: leave out one of them")
    train_all(jobs, options, folders)
    return created


def train_seeds(choices: Sequence[Choice], options: argparse.Namespace, name: str) -> int:
    """Trains one configuration with each seed, and prints the result of each run."""
    from fedhen.experiment.choices import Job

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
    """Returns the name of a run: recipe, method, and local variant and what makes models personal if there are any."""
    local = f"-{config.local.name}" if config.local.name != "plain" else ""
    personal = f"-{config.personal.name}" if config.personal.name != "none" else ""
    return f"{config.recipe}-{config.method}{local}{personal}"


def read_planned_config(folder: Path, rounds: int | None, stop: Mapping[str, Any] = NO_CHANGES) -> Config:
    """Returns the configuration of a run, with the given rounds, if any, and the given parts of its [stop].

    Rounds can be added but not removed.
    """
    config = toml.read_toml(find_config(folder))
    if rounds is not None and rounds < config.rounds:
        raise ConfigError(
            f"{folder} was planned for {config.rounds} rounds; rounds can be added but not removed: `fedhen finish` "
            "ends a run where it is"
        )
    return from_mapping({"stop": stop}, config if rounds is None else replace(config, rounds=rounds))


def describe_result(folder: Path) -> str:
    """Returns the result of a run in a few lines."""
    run = read_run(folder)
    summary = run.summary or Summary({})
    final = summary.final
    owner = reported_owner(final) if final else ""
    scores = final.get(owner, {}).items()
    lines = [f"{tier:10} {describe_score(run, x)} ({name_owner([run], owner)})" for tier, x in scores]
    dropped = [f"{summary.dropped} devices were dropped for weights that are not finite"] * bool(summary.dropped)
    failed = [f"{summary.failed} devices failed and were left out: {folder}/errors.jsonl"] * bool(summary.failed)
    late = [f"{summary.late} answers were late and were left out"] * bool(summary.late)
    return "\n".join(
        [*lines, *dropped, *failed, *late, *describe_privacy(summary), *describe_stop(run), f"run: {folder}"]
    )


def describe_privacy(summary: Summary) -> list[str]:
    """Returns what a run with differential privacy has spent; nothing for another run."""
    if (promise := summary.privacy) is None:
        return []
    spent = "infinite" if promise.epsilon is None else f"{promise.epsilon:.3g}"
    lines = [f"differential privacy: ε = {spent}, δ = {promise.delta:.2g} ({promise.accountant})"]
    return [*lines, *([promise.guarantee] if promise.guarantee else [])]


def describe_stop(run: Run) -> list[str]:
    """Returns why a run ended before its last planned round; nothing if it did not."""
    if not run.stopped:
        return []
    lines = [f"stopped after {run.length} of {run.settings.rounds} rounds: {one_line(run.stopped)}"]
    last = max((record.round for record in run.rounds if record.values(run.metric.name)), default=0)
    if last < run.length:
        scored = f"the scores are of round {last}" if last else "no round was evaluated"
        lines.append(f"{scored}; `fedhen evaluate` scores the models of round {run.length}")
    return lines


def describe_score(run: Run, value: float | None) -> str:
    # 84.4 % of the test set; perplexity 5.52 on the test set; 75.6 % on the devices’ own test data, on average
    shown = run.metric.format(value)
    scored = shown if run.metric == ACCURACY else f"{run.metric.title} {shown}"
    if run.scores_own_models:
        return f"{scored} on the devices’ own test data, on average"
    return f"{scored} {'of' if run.metric == ACCURACY else 'on'} the test set"
