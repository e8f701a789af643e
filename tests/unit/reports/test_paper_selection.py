"""Which runs count as the paper's, and which are left out."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fedhen.config.recipes import load_recipe, make_centralised
from fedhen.config.toml import to_toml
from fedhen.reports.paper.report import CENTRALISED, PAPER_RUNS, has_finished_run
from fedhen.reports.paper.selection import match_reference, select_runs
from fedhen.reports.paper.tables import make_paper_tables
from fedhen.runs.reader import read_run
from support.paper_runs import cells, federated, from_the_paper, one_place, tables
from support.report_fixtures import make_run, staircase


def test_the_order_to_run_in() -> None:
    assert PAPER_RUNS[:4] == (
        ("cifar10-iid", "fedhen"),
        ("cifar10-iid", "decouple"),
        ("cifar10-iid", "noside"),
        ("cifar10-noniid", "fedhen"),
    )
    assert len(set(PAPER_RUNS)) == 12
    assert CENTRALISED[:2] == (("cifar10", "complex", 1.0), ("cifar10", "complex", 0.5))
    assert len(set(CENTRALISED)) == 8


def test_a_finished_run_is_the_one_that_is_asked_for_only_if_its_settings_and_seed_are(tmp_path: Path) -> None:
    """Settings of execution and evaluation make no difference; any other setting, the seed or the method does."""
    config = replace(load_recipe("cifar10-iid"), rounds=3)
    run = from_the_paper("cifar10-iid", "fedhen")
    run = replace(run, config=tomllib.loads(to_toml(config)))
    looks = replace(config, evaluation=replace(config.evaluation, every=1), runtime=replace(config.runtime, threads=7))
    assert has_finished_run([run], config) and has_finished_run([run], looks)
    assert not has_finished_run([replace(run, summary=None)], config)
    for other in (
        replace(config, seed=1),
        replace(config, method="noside"),
        replace(config, rounds=4),
        replace(config, data=replace(config.data, name="cifar100")),
        replace(config, objective=replace(config.objective, exit_weights={"simple": 0.5})),
    ):
        assert not has_finished_run([run], other)
    weighted = from_the_paper("cifar10-iid", "fedhen")
    weighted.config["objective"]["exit_weights"] = {"simple": 0.5}
    assert any("objective.exit_weights = {'simple': 0.5}" in text for text in select_runs([weighted]).warnings)
    # A run that is older than a setting has its default.
    older = tomllib.loads(to_toml(config))
    del older["training"]["lr_warmup"]
    assert has_finished_run([replace(run, config=older)], config)
    warmed = replace(config, training=replace(config.training, lr_warmup=5))
    assert not has_finished_run([replace(run, config=older)], warmed)
    reference = one_place("cifar10", "simple", 1.0, [0.9] * 100)
    del reference.config["training"]["lr_warmup"]
    assert any("changes its recipe, training.lr_warmup = 0" in text for text in select_runs([reference]).warnings)


@pytest.mark.slow
def test_the_runs_under_results_are_those_that_the_command_would_make() -> None:
    """`fedhen paper --run --runs results` runs only what is missing there."""
    folders = [path.parent for path in (Path(__file__).parents[3] / "results").glob("*/config.toml")]
    runs = [read_run(folder) for folder in folders]
    assert len(runs) >= 3
    for run in runs:
        place = match_reference(run)
        recipe = make_centralised(load_recipe(f"{place[0]}-iid"), *place[1:]) if place else load_recipe(run.recipe)
        assert has_finished_run([run], replace(recipe, method=run.method, seed=run.seed)), run.folder


def test_a_run_that_changes_its_recipe_stands_in_only_where_none_follows_it() -> None:
    faithful = from_the_paper("cifar10-iid", "fedhen")
    short = {tier: staircase(20, {7: 0.9}) for tier in ("simple", "complex")}
    trial = federated("cifar10-iid", "fedhen", short, seed=1)
    trial = replace(trial, folder=Path("trial"))
    limited = one_place("cifar10", "simple", 1.0, [0.9] * 100)
    limited.config["data"]["limit"] = 2000

    alone = select_runs([trial, limited])
    assert cells(make_paper_tables(alone, "devices")[0])["simple", "CIFAR-10", "84.4 %"][0] == "7 (289)"
    assert "cifar10-iid, fedhen, seed 1 (trial) changes its recipe, rounds = 20." in alone.warnings[0]
    assert "data.limit = 2000" in alone.warnings[1]

    both = select_runs([trial, faithful])
    assert both.federated["cifar10-iid", "fedhen"] == (faithful,)
    assert both.warnings == ("Left out: cifar10-iid, fedhen, seed 1 (trial); it changes its recipe, rounds = 20.",)


def test_of_two_runs_of_one_seed_the_finished_one_counts() -> None:
    done = from_the_paper("cifar10-iid", "fedhen")
    stopped = replace(done, summary=None, folder=Path("stopped"))
    for runs in ([done, stopped], [stopped, done]):
        found = select_runs(runs)
        assert found.federated["cifar10-iid", "fedhen"] == (done,)
        assert "(stopped)" in found.warnings[0]


def test_runs_of_other_experiments_are_left_aside() -> None:
    curves = {"simple": [0.9], "complex": [0.9]}
    runs = [
        make_run("fedhen", curves, recipe="digits"),
        make_run("fedprox", curves, recipe="cifar10-iid"),
        make_run("fedhen", {"small": [0.9]}, recipe="cifar10-iid"),
        make_run("fedavg", curves, recipe="cifar10-centralised"),
        make_run("fedavg", {"simple": [0.9]}, recipe="cifar10-centralised", data={"fraction": 0.25}),
    ]
    assert select_runs(runs).runs == []
    assert tables(runs) == tables([])
