"""Selects the runs that belong to the paper's experiments."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from fedhen.config.recipes import load_recipe, make_centralised
from fedhen.config.settings import Config
from fedhen.config.toml import to_toml
from fedhen.config.validation import flatten_config
from fedhen.reports.comparison import compare, list_warnings, rounds_done
from fedhen.reports.paper.values import (
    CENTRALISED_PERCENT,
    DATA_SETS,
    METHODS,
    ROUNDS_TO_TARGET,
    SPLITS,
    TIERS,
    Reference,
)
from fedhen.reports.variants import EXECUTION_SECTIONS, NEUTRAL_SECTIONS
from fedhen.runs.reader import Run

Cell = tuple[str, str]
"""A recipe and a method."""

PAPER_RUNS: tuple[Cell, ...] = tuple(
    (split.recipes[data], method) for data in DATA_SETS for split in SPLITS for method in METHODS
)
"""The paper's twelve runs in the order of its figures."""
CENTRALISED: tuple[Reference, ...] = tuple(CENTRALISED_PERCENT)
"""The paper's eight centralised references."""
NOT_RUN = "not run"
IGNORED_SECTIONS = (*NEUTRAL_SECTIONS, *EXECUTION_SECTIONS)
MAY_DIFFER = ("recipe", "method", "seed", *IGNORED_SECTIONS)
"""Settings and sections that may differ from the recipe's in a run of the paper's experiment."""
MUST_AGREE = ("evaluation.validation",)
"""Settings of these sections that may not differ, because they decide what is trained on."""


@dataclass(frozen=True)
class Selection:
    """The runs of the tables and figures, one per seed, and warnings about them."""

    federated: Mapping[Cell, tuple[Run, ...]]
    centralised: Mapping[Reference, tuple[Run, ...]]
    warnings: tuple[str, ...]

    @property
    def runs(self) -> list[Run]:
        return [*chain.from_iterable(self.federated.values()), *chain.from_iterable(self.centralised.values())]

    def of_recipe(self, recipe: str) -> list[Run]:
        """Returns the runs of all methods, in the order of the paper's columns."""
        return [run for method in METHODS for run in self.federated[recipe, method]]


def select_runs(runs: Sequence[Run]) -> Selection:
    """Sorts runs into the cells of the paper's tables. Runs of other experiments are ignored."""
    federated = {place: [run for run in runs if match_cell(run) == place] for place in PAPER_RUNS}
    references = {place: [run for run in runs if match_reference(run) == place] for place in CENTRALISED}
    selection = Selection(
        {place: _choose_runs(each) for place, each in federated.items()},
        {place: _choose_runs(each) for place, each in references.items()},
        warnings=(),
    )
    candidates = chain.from_iterable([*federated.values(), *references.values()])
    return Selection(selection.federated, selection.centralised, tuple(_list_warnings(selection, list(candidates))))


def has_finished_run(runs: Sequence[Run], config: Config) -> bool:
    """Returns whether one of the runs is finished and has the configuration's experiment and seed."""
    wanted = _experiment_settings(tomllib.loads(to_toml(config)))
    return any(run.summary is not None and _experiment_settings(_as_played(run)) == wanted for run in runs)


def _as_played(run: Run) -> dict[str, Any]:
    """Returns a run's configuration with the rounds that it has: it may have been stopped before its last one."""
    return {**run.config, "rounds": run.length}


def _experiment_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flatten_config(config).items() if not _belongs_to(key, IGNORED_SECTIONS)}


def _belongs_to(key: str, sections: Sequence[str]) -> bool:
    return key.split(".")[0] in sections and key not in MUST_AGREE


def match_cell(run: Run) -> Cell | None:
    """Returns the recipe and method of a run of the paper, None for other runs."""
    belongs = run.recipe in ROUNDS_TO_TARGET and run.method in METHODS and run.tiers == TIERS
    return (run.recipe, run.method) if belongs else None


def match_reference(run: Run) -> Reference | None:
    """Returns the centralised reference that a run belongs to, None for other runs."""
    data, _, ending = run.recipe.rpartition("-")
    if ending != "centralised":
        return None
    place = (data, *run.tiers, run.settings.data.fraction)
    return next((each for each in CENTRALISED if each == place), None)


def list_changes(run: Run) -> list[str]:
    """Returns the settings that a run of the paper changes in its recipe, as key = value."""
    if (place := match_reference(run)) is not None:
        data, tier, fraction = place
        recipe = make_centralised(load_recipe(f"{data}-iid"), tier, fraction)
    elif match_cell(run) is not None:
        recipe = load_recipe(run.recipe)
    else:
        return []
    wanted, found = flatten_config(tomllib.loads(to_toml(recipe))), flatten_config(_as_played(run))
    kept = (key for key in found if not _belongs_to(key, MAY_DIFFER))
    return [f"{key} = {found[key]}" for key in kept if found[key] != wanted.get(key)]


def _choose_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    # Of each seed the longest run; runs that change their recipe count only if no run follows it.
    faithful = [run for run in runs if not list_changes(run)]
    by_seed: dict[int, Run] = {}
    for run in sorted(faithful or runs, key=lambda run: (run.summary is not None, rounds_done(run))):
        by_seed[run.seed] = run
    return tuple(by_seed[seed] for seed in sorted(by_seed))


def _list_warnings(selection: Selection, candidates: Sequence[Run]) -> Iterator[str]:
    for recipe in ROUNDS_TO_TARGET:
        if runs := selection.of_recipe(recipe):
            yield from (f"{recipe}: {text}" for text in list_warnings(compare(runs)))
    for place, each in selection.centralised.items():
        yield from (f"{describe_reference(place)}: {text}" for text in (list_warnings(compare(each)) if each else ()))
    for run in selection.runs:
        if changed := list_changes(run):
            yield f"Not the paper’s experiment: {run.recipe}, {run.label} changes its recipe, {', '.join(changed)}."
    used = set(map(id, selection.runs))
    for run in candidates:
        if id(run) not in used:
            changed = list_changes(run)
            why = f"it changes its recipe, {', '.join(changed)}" if changed else "another run of its seed is shown"
            yield f"Left out: {run.recipe}, {run.label}; {why}."


def describe_reference(place: Reference) -> str:
    data, tier, fraction = place
    return f"{DATA_SETS[data]} centralised, {tier}, {format_fraction(fraction)} data"


def format_unfinished(run: Run) -> str:
    return f"unfinished (round {rounds_done(run)})"


def format_fraction(fraction: float) -> str:
    return {1.0: "all", 0.5: "half"}[fraction]
