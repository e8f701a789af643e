"""Invented runs of the paper's recipes, and what its tables say of them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from fedhen.config.recipes import load_recipe, make_centralised
from fedhen.config.settings import Config
from fedhen.config.toml import to_toml
from fedhen.reports.paper.accuracies import make_accuracy_table
from fedhen.reports.paper.centralised import make_centralised_table
from fedhen.reports.paper.report import CENTRALISED, PAPER_RUNS
from fedhen.reports.paper.selection import select_runs
from fedhen.reports.paper.tables import make_further_tables, make_paper_tables
from fedhen.reports.paper.values import ROUNDS_TO_TARGET
from fedhen.reports.rendering import Table
from fedhen.runs.reader import Run
from support.report_fixtures import Curves, make_run, staircase

Cells = dict[tuple[str, str, str], tuple[str, ...]]
"""(tier, data set, accuracy or amount of data) -> the other cells of the row."""


def settings(config: Config) -> dict[str, Any]:
    """A configuration as read from a run folder, without what `make_run` sets itself."""
    values = tomllib.loads(to_toml(config))
    return {key: value for key, value in values.items() if key not in ("method", "seed", "rounds")}


def federated(recipe: str, method: str, curves: Curves, **changes: Any) -> Run:
    """A run of the recipe with 1 MB per tier, direction and round, evaluated in the rounds of the curves."""
    return make_run(method, curves, **{**settings(load_recipe(recipe)), **changes})


def from_the_paper(recipe: str, method: str, seed: int = 0, shift: int = 0) -> Run:
    """A run that reaches the paper's targets in the paper's rounds, or `shift` rounds later, and no more."""
    curves = {
        tier: staircase(1000, {row.rounds[method] + shift: row.percent / 100 for row in reversed(rows)})
        for tier, rows in ROUNDS_TO_TARGET[recipe].items()
    }
    return federated(recipe, method, curves, seed=seed, evaluation={"every": 1})


def one_place(data: str, tier: str, fraction: float, curve: Sequence[float], **changes: Any) -> Run:
    config = make_centralised(load_recipe(f"{data}-iid"), tier, fraction)
    return make_run("fedavg", {tier: curve}, **{"planned": 100, **settings(config), **changes})


def cells(table: Table) -> Cells:
    return {
        (group.title.removesuffix(" model"), row[0], row[1]): row[2:] for group in table.groups for row in group.rows
    }


def tables(runs: Sequence[Run], owner: str = "devices") -> dict[str, Table]:
    found = select_runs(runs)
    every = [*make_paper_tables(found, owner), *make_further_tables(found, owner), make_centralised_table(found)]
    every.append(make_accuracy_table(found, owner))
    return {table.name: table for table in every}


def make_all_runs() -> list[Run]:
    """The paper's twelve runs and its eight centralised references."""
    references = [one_place(*place, staircase(100, {50: 0.6, 99: 0.8, 100: 0.75})) for place in CENTRALISED]
    return [from_the_paper(*place) for place in PAPER_RUNS] + references
