"""Runs of one recipe, checked at the door and grouped by method: what every table, curve and page is made of.

Runs of one method and seed that differ in settings are variants of it, each with a column of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fedhen.errors import UserError, unknown
from fedhen.records import KINDS, Run

HERO = "fedhen"
"""The method whose gain over the best other one is reported, where it is among the runs."""


BROUGHT = (
    *("method", "method_file", "seed", "tiers", "targets", "local"),
    *("model.nesting", "model.scaler", "training.masked_loss", "server.label_rows"),
    *("checkpoint", "fleet"),
)
"""Settings and sections in which runs may differ without a word: methods bring them along, or they change no number."""
HANDLING = ("rounds", "runtime", "evaluation", "targets", "checkpoint", "fleet")
"""Settings and sections that say how an experiment is played and looked at, not which one it is."""


@dataclass(frozen=True)
class Comparison:
    """The runs of every method, one a seed; the first method is the hero, the others are its baselines."""

    by_method: dict[str, tuple[Run, ...]]
    varied: frozenset[str] = frozenset()
    """The settings that tell a method's variants apart; a variant's name gives its own."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The hero first."""
        return tuple(self.by_method)

    @property
    def hero(self) -> str:
        """The method whose gain over the others is reported."""
        return self.methods[0]

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, method by method."""
        return tuple(chain.from_iterable(self.by_method.values()))

    @property
    def recipe(self) -> str:
        """The recipe that all runs follow."""
        return self.runs[0].recipe

    @property
    def tiers(self) -> tuple[str, ...]:
        """Shallowest first."""
        return max((run.tiers for run in self.runs), key=len)

    @property
    def several_seeds(self) -> bool:
        """Whether some method has more than one run."""
        return len(self.runs) > len(self.methods)

    def heading(self, method: str) -> str:
        """A method's name, with its number of runs where that is not one for all, and a mark where one is damaged."""
        notes = [f"n = {len(self.by_method[method])}"] if self.several_seeds else []
        notes += ["damaged"] if any(run.damage for run in self.by_method[method]) else []
        return f"{method} ({', '.join(notes)})" if notes else method


def compare(runs: Sequence[Run], hero: str = HERO) -> Comparison:
    """Group runs by method, the hero first (the first run's method where the hero is not among them)."""
    if not runs:
        raise UserError("nothing to report: give at least one run folder")
    first, most = runs[0], max(runs, key=lambda run: len(run.tiers))
    for run in runs:
        if run.recipe != first.recipe:
            raise UserError(
                f"runs of different recipes need a report each: {first.folder} is {first.recipe}, "
                f"{run.folder} is {run.recipe}"
            )
        if not set(run.tiers) <= set(most.tiers):
            raise UserError(
                f"runs with different tiers need a report each: {most.folder} has {', '.join(most.tiers)}, "
                f"{run.folder} has {', '.join(run.tiers)}"
            )
    methods = dict.fromkeys(run.method for run in runs)
    varied = frozenset(chain.from_iterable(_varied([run for run in runs if run.method == each]) for each in methods))
    plain = {each: next(run for run in runs if run.method == each) for each in methods}
    named: dict[str, list[Run]] = {}
    for run in runs:
        named.setdefault(_name(run, plain[run.method], varied), []).append(run)
    # Where no run is plainly the hero's, one with a local variant of it is.
    first_of = {name: each[0].method for name, each in named.items()}
    names = sorted(named, key=lambda n: (first_of[n] != hero, first_of[n].partition("+")[0] != hero, n != first_of[n]))
    return Comparison({name: _seeds(named[name]) for name in names}, varied)


def _varied(runs: Sequence[Run]) -> set[str]:
    """The settings in which runs of a method and seed differ; how they were played counts where nothing else does."""
    differ: set[str] = set()
    for seed in {run.seed for run in runs}:
        twins = [flat(run.config) for run in runs if run.seed == seed]
        differ |= {key for key in chain.from_iterable(twins) if len({str(twin.get(key)) for twin in twins}) > 1}
    return {key for key in differ if key.split(".")[0] not in HANDLING} or differ


def _name(run: Run, plain: Run, varied: Iterable[str]) -> str:
    """A method's name, and what makes a variant of it: the settings that are not those of the method's first run."""
    own, usual = flat(run.config), flat(plain.config)
    changed = [key for key in own if key in varied and own[key] != usual.get(key)]
    ends = Counter(key.rpartition(".")[2] for key in varied)
    short = {key: key if ends[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in changed}
    return ", ".join([run.method, *(f"{short[key]}={own[key]}" for key in changed)])


def _seeds(runs: Sequence[Run]) -> tuple[Run, ...]:
    """One method's runs by seed; a second run of the same seed is no further evidence, so it is refused."""
    seen: dict[int, Run] = {}
    for run in runs:
        twin = seen.setdefault(run.seed, run)
        if twin is not run:
            raise UserError(
                f"two runs of {run.method} with seed {run.seed}: {twin.folder} and {run.folder}; leave one out"
            )
    return tuple(seen[seed] for seed in sorted(seen))


def rounds_done(run: Run) -> int:
    """The last recorded round, 0 before the first."""
    return int(run.rounds[-1]["round"]) if run.rounds else 0


def rounds_planned(run: Run) -> int:
    """The rounds that the configuration asks for."""
    return int(run.config.get("rounds", rounds_done(run)))


def evaluated(run: Run) -> bool:
    """Whether some round has accuracies."""
    return any("accuracy" in record for record in run.rounds)


def scored_kind(runs: Sequence[Run], asked: str | None) -> str:
    """Whose models are reported: the kind that is asked for, else the first of KINDS that all runs have."""
    if asked is None:
        return next(kind for kind in KINDS if all(kind in run.kinds for run in runs))
    if asked not in KINDS:
        raise unknown("kind", asked, KINDS)
    for run in runs:
        if asked not in run.kinds:
            raise UserError(
                f"{run.folder} kept no average of all devices (evaluation.devices = false): use --of server"
            )
    return asked


def warnings(comparison: Comparison) -> list[str]:
    """What a reader must know before trusting the numbers; empty if all runs are whole, finished and set up alike."""
    runs = comparison.runs
    return [*_damaged(runs), *_unfinished(runs), *_without_average(runs), *_differences(comparison)]


def _damaged(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.damage:
            progress = f"{rounds_done(run)} of {rounds_planned(run)} rounds can be read"
            yield f"Damaged: {run.method}, seed {run.seed} ({run.folder.name}): {'; '.join(run.damage)}; {progress}."


def _unfinished(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        name = f"{run.method}, seed {run.seed} ({run.folder.name})"
        progress = f"{rounds_done(run)} of {rounds_planned(run)} rounds recorded"
        if not evaluated(run):
            yield f"No evaluated round yet: {name}, {progress}."
        elif run.summary is None:
            yield f"Unfinished: {name}, {progress}; its numbers can still change."


def _without_average(runs: Sequence[Run]) -> Iterator[str]:
    without = [f"{run.method}, seed {run.seed}" for run in runs if KINDS[0] not in run.kinds]
    if without:
        yield (
            f"No average of all devices, which the paper reports, was kept by {'; '.join(without)}: "
            "the server’s models are compared."
        )


def _differences(comparison: Comparison) -> Iterator[str]:
    settings = [flat(run.config) for run in comparison.runs]
    # What tells a method's variants apart is in their names; between methods it may differ all the same.
    plain = [flat(run.config) for name, runs in comparison.by_method.items() for run in runs if name == run.method]
    for key in dict.fromkeys(chain.from_iterable(settings)):
        compared = plain if key in comparison.varied else settings
        values = list(dict.fromkeys(str(each.get(key, "not set")) for each in compared))
        if len(values) > 1 and key not in BROUGHT and key.split(".")[0] not in BROUGHT:
            yield f"The runs differ in more than method and seed: {key} is {' or '.join(values)}."


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys; empty ones leave nothing."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return leaves
