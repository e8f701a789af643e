"""Runs of one recipe, grouped by method: the input of every table, chart and page.

Runs of one method and seed that differ in settings are variants of the method. Each variant gets its own column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fedhen.config.validation import flatten_config
from fedhen.errors import FedhenError, unknown_name
from fedhen.reports.variants import NEUTRAL_SECTIONS, NOT_SET, find_variants, format_value
from fedhen.runs.layout import MODEL_OWNERS
from fedhen.runs.reader import Run
from fedhen.runs.records import MetricInfo

HERO = "fedhen"
"""The method whose gain over the best other method is reported, if any of the runs has it."""


MAY_DIFFER = (
    *("method", "method_file", "seed", "tiers", "local", "personal", "evaluation.own", "evaluation.devices"),
    *("model.nesting", "model.scaler", "training.masked_loss", "server.rows_by_class"),
    *NEUTRAL_SECTIONS,
)
"""Settings and sections that may differ without a warning: methods set them, or they change no number."""


@dataclass(frozen=True)
class Comparison:
    """The runs of every method, one per seed. The first method is the hero, the others are its baselines."""

    by_method: dict[str, tuple[Run, ...]]
    """Method, or name of a method's variant -> runs."""
    base: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Method -> the settings in which its variants differ, with the values of the unnamed variant."""

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.by_method)

    @property
    def hero(self) -> str:
        """The method whose gain over the others is reported."""
        return self.methods[0]

    @property
    def others(self) -> tuple[str, ...]:
        """The methods that the hero is compared with; its own variants are not among them."""
        of = {name: runs[0].method for name, runs in self.by_method.items()}
        return tuple(name for name in self.methods if of[name] != of[self.hero])

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(chain.from_iterable(self.by_method.values()))

    @property
    def recipe(self) -> str:
        return self.runs[0].recipe

    @property
    def metric(self) -> MetricInfo:
        """The primary metric of all runs."""
        return self.runs[0].metric

    @property
    def other_metrics(self) -> tuple[MetricInfo, ...]:
        """The further metrics that any of the runs records."""
        return tuple(dict.fromkeys(metric for run in self.runs for metric in run.metrics[1:]))

    @property
    def has_scores(self) -> bool:
        """Whether any run has scores, or may still get some."""
        return not all(map(lacks_test_data, self.runs))

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers of the run that has most, shallowest first."""
        return max((run.tiers for run in self.runs), key=len)

    @property
    def several_seeds(self) -> bool:
        return len(self.runs) > len(self.methods)

    def heading(self, method: str) -> str:
        """Returns a method's name, with its number of runs if any method has several, and a mark if one is damaged."""
        notes = [f"n = {len(self.by_method[method])}"] if self.several_seeds else []
        notes += ["damaged"] if any(run.damage for run in self.by_method[method]) else []
        return f"{method} ({', '.join(notes)})" if notes else method


def compare(runs: Sequence[Run], hero: str = HERO) -> Comparison:
    """Groups runs by method, the hero first (the first run's method if no run is the hero's)."""
    if not runs:
        raise FedhenError("nothing to report: give at least one run folder")
    _refuse_different(runs, "of different recipes", lambda run: run.recipe, lambda run: f"is {run.recipe}")
    _refuse_different(runs, "of different tasks", lambda run: run.subject.task, lambda run: f"is {run.subject.task}")
    _refuse_different(runs, "on different data", lambda run: run.subject.data_digest, _describe_data)
    _refuse_different(runs, "with different metrics", lambda run: run.metric, _describe_metric)
    most = max(runs, key=lambda run: len(run.tiers))
    for run in runs:
        if not set(run.tiers) <= set(most.tiers):
            raise FedhenError(
                f"runs with different tiers need a report each: {most.folder} has {', '.join(most.tiers)}, "
                f"{run.folder} has {', '.join(run.tiers)}"
            )
    # If no run has exactly the hero's method, one with a local variant of it comes first.
    methods = sorted(dict.fromkeys(run.method for run in runs), key=lambda m: (m != hero, m.partition("+")[0] != hero))
    found = {method: find_variants([run for run in runs if run.method == method]) for method in methods}
    return Comparison(
        {name: _sort_by_seed(each) for method in methods for name, each in found[method].by_name.items()},
        {method: found[method].base for method in methods},
    )


def _refuse_different(
    runs: Sequence[Run], what: str, key: Callable[[Run], object], describe: Callable[[Run], str]
) -> None:
    """Raises FedhenError for runs whose keys differ. Runs from before the key was recorded have none, and pass."""
    known = [run for run in runs if key(run)]
    for run in known:
        if key(run) != key(known[0]):
            raise FedhenError(
                f"runs {what} need a report each: {known[0].folder} {describe(known[0])}, {run.folder} {describe(run)}"
            )


def _describe_data(run: Run) -> str:
    return f"has {run.settings.data.name} ({run.subject.data_digest[:8]})"


def _describe_metric(run: Run) -> str:
    unit = f"{run.metric.unit}, " if run.metric.unit else ""
    return f"has {run.metric.title} ({unit}{run.metric.direction} is better)"


def _sort_by_seed(runs: Sequence[Run]) -> tuple[Run, ...]:
    # A second run with the same seed adds no evidence.
    seen: dict[int, Run] = {}
    for run in runs:
        twin = seen.setdefault(run.seed, run)
        if twin is not run:
            raise FedhenError(
                f"two runs of {run.method} with seed {run.seed}: {twin.folder} and {run.folder}; leave one out"
            )
    return tuple(seen[seed] for seed in sorted(seen))


def rounds_done(run: Run) -> int:
    """Returns the last recorded round, 0 if there is none."""
    return run.rounds[-1].round if run.rounds else 0


def list_evaluated(run: Run) -> list[int]:
    """Returns the rounds with scores, whether or not these are finite."""
    return [record.round for record in run.rounds if record.values(run.metric.name)]


def is_evaluated(run: Run) -> bool:
    return bool(list_evaluated(run))


def lacks_test_data(run: Run) -> bool:
    """Whether there was nothing to score the models on: with test data, the last round of a run is evaluated."""
    whole = run.summary is not None and not run.truncated_from and not run.damage and not run.stopped
    return whole and not is_evaluated(run)


def choose_owner(runs: Sequence[Run], asked: str | None) -> str:
    """Returns whose models are reported: `asked`, or by default the first of MODEL_OWNERS that all runs scored."""
    if asked is None:
        return next(owner for owner in MODEL_OWNERS if all(owner in run.owners for run in runs))
    if asked not in MODEL_OWNERS:
        raise unknown_name("owner", asked, MODEL_OWNERS)
    for run in runs:
        if asked not in run.owners:
            raise FedhenError(
                f"{run.folder} kept no average of all devices (evaluation.devices = false): "
                "use --of server, or of='server' in Python"
            )
    return asked


def list_warnings(comparison: Comparison) -> list[str]:
    """Returns what limits the numbers; empty if all runs are undamaged, finished and configured alike."""
    runs = comparison.runs
    return [
        *_warn_of_truncated(runs),
        *_warn_of_damaged(runs),
        *_explain_stops(runs),
        *_warn_of_unfinished(runs),
        *_warn_of_missing_average(runs),
        *_explain_variants(comparison),
        *_warn_of_differences(comparison),
    ]


def _warn_of_truncated(runs: Sequence[Run]) -> Iterator[str]:
    cuts: dict[str, list[str]] = {}
    for run in runs:
        if run.truncated_from:
            cuts.setdefault(f"{run.settings.rounds} of {run.truncated_from}", []).append(run.folder.name)
    for share, names in cuts.items():
        yield f"Only the first {share} rounds are used: {', '.join(names)}."


def _warn_of_damaged(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.damage:
            progress = f"{rounds_done(run)} of {run.length} rounds can be read"
            yield f"Damaged: {run.label}: {'; '.join(run.damage)}; {progress}."


def _explain_stops(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.stopped and not run.truncated_from:
            yield f"Stopped: {run.label}, after {run.length} of {run.settings.rounds} rounds: {run.stopped}."


def _warn_of_unfinished(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        progress = f"{rounds_done(run)} of {run.settings.rounds} rounds recorded"
        if lacks_test_data(run):
            yield f"No scores, since there is no test data: {run.label}, {progress}."
        elif not is_evaluated(run):
            yield f"No evaluated round{'' if run.is_complete else ' yet'}: {run.label}, {progress}."
        elif not run.is_complete:
            yield f"Unfinished: {run.label}, {progress}; its numbers can still change."


def _warn_of_missing_average(runs: Sequence[Run]) -> Iterator[str]:
    without = [run.label for run in runs if MODEL_OWNERS[0] not in run.owners and not run.scores_own_models]
    if without:
        yield (
            f"No average of all devices, which the paper reports, was kept by {'; '.join(without)}: "
            "the server’s models are compared."
        )


def _explain_variants(comparison: Comparison) -> Iterator[str]:
    for method, base in comparison.base.items():
        if base:
            settings = ", ".join(f"{key} = {format_value(value)}" for key, value in base.items())
            yield f"Variants of {method}, named by what they change; {method} itself has {settings}."


def _warn_of_differences(comparison: Comparison) -> Iterator[str]:
    # The settings in which a method's variants differ are in their names, but they may also differ between methods.
    settings = [{**flatten_config(run.config), **comparison.base[run.method]} for run in comparison.runs]
    for key in dict.fromkeys(chain.from_iterable(settings)):
        values = list(dict.fromkeys(format_value(each.get(key, NOT_SET)) for each in settings))
        if len(values) > 1 and key not in MAY_DIFFER and key.split(".")[0] not in MAY_DIFFER:
            yield f"The runs differ in more than method and seed: {key} is {' or '.join(values)}."
