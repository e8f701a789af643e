"""The paper's tables and figures: every expected number is the paper's or derived in a comment next to it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from fedhen.config.recipes import load_recipe, make_centralised
from fedhen.config.settings import Config
from fedhen.config.toml import to_toml
from fedhen.errors import UserError
from fedhen.reports.costs import Cost, Outcome, gain
from fedhen.reports.curves import choose_looks
from fedhen.reports.names import SEEDS
from fedhen.reports.paper.accuracies import make_accuracy_table
from fedhen.reports.paper.centralised import make_centralised_table
from fedhen.reports.paper.figures import PaperFigure, make_figures
from fedhen.reports.paper.report import CENTRALISED, PAPER_RUNS, has_finished_run, write_paper
from fedhen.reports.paper.selection import match_reference, select_runs
from fedhen.reports.paper.tables import make_further_tables, make_outcome_tables, make_paper_tables
from fedhen.reports.paper.values import METHODS, ROUNDS_TO_TARGET
from fedhen.reports.rendering import Table
from fedhen.runs.reader import Run, read_run
from support.pages import Checker
from support.report_fixtures import Curves, make_run, staircase, write_folder

# The rows of the paper's tables from top to bottom, as its source has them
TABLE_1 = """
84.4 & 289 & 943 & 805 & 2.8  83.4 & 249 & 731 & 669 & 2.7  46.4 & 296 & 864 & 984 & 2.9  45.4 & 250 & 588 & 807 & 2.4
88.5 & 649 & 991 & 941 & 1.4  87.5 & 456 & 739 & 669 & 1.5  46.8 & 468 & 963 & 614 & 1.3  45.8 & 376 & 752 & 472 & 1.3
"""
TABLE_2 = """
79.4 & 295 & 986 & 810 & 2.7  78.4 & 256 & 816 & 676 & 2.6  43.8 & 278 & 978 & 914 & 3.3  42.8 & 239 & 813 & 762 & 3.2
84.2 & 596 & 1000 & 857 & 1.4  83.2 & 519 & 887 & 751 & 1.4  44.8 & 450 & 997 & 498 & 1.1  43.8 & 372 & 754 & 456 & 1.2
"""
Cells = dict[tuple[str, str, str], tuple[str, ...]]
"""(tier, data set, accuracy or amount of data) -> the other cells of the row."""


def printed(table: str) -> list[tuple[str, ...]]:
    return [tuple(row.split(" & ")) for row in re.split(r"  |\n", table.strip())]


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


@pytest.fixture(scope="module")
def all_runs() -> list[Run]:
    references = [one_place(*place, staircase(100, {50: 0.6, 99: 0.8, 100: 0.75})) for place in CENTRALISED]
    return [from_the_paper(*place) for place in PAPER_RUNS] + references


@pytest.mark.parametrize("row", [*printed(TABLE_1), *printed(TABLE_2)], ids="-".join)
def test_the_papers_sixteen_gains_follow_from_its_rounds(row: tuple[str, ...]) -> None:
    _, *rounds, expected = row
    hero, *baselines = [[Cost(int(each), Outcome.REACHED)] for each in rounds]
    assert gain(hero, baselines) == f"{expected}×"


@pytest.mark.parametrize(("name", "source"), [("table-1", TABLE_1), ("table-2", TABLE_2)])
def test_the_papers_value_stands_beside_ours_in_every_cell(all_runs: list[Run], name: str, source: str) -> None:
    """Runs that take the paper's rounds: each cell has the same number twice, also the recomputed gains."""
    ran, empty = tables(all_runs)[name], tables([])[name]
    assert ran.columns == ("Dataset", "Accuracy", "FedHeN", "Decouple", "NoSide", "Gain")
    assert [group.title for group in ran.groups] == ["simple model", "complex model"]
    places = [(tier, data) for tier in ("simple", "complex") for data in ("CIFAR-10", "CIFAR-100") for _ in range(2)]
    for (tier, data), (accuracy, *rounds, gained) in zip(places, printed(source), strict=True):
        values = [*rounds, f"{gained}×"]
        assert cells(ran)[tier, data, f"{accuracy} %"] == tuple(f"{value} ({value})" for value in values)
        assert cells(empty)[tier, data, f"{accuracy} %"] == tuple(f"not run ({value})" for value in values)
    assert len(cells(ran)) == len(cells(empty)) == 8
    assert (
        list(cells(ran))
        == list(cells(empty))
        == [(*p, f"{r[0]} %") for p, r in zip(places, printed(source), strict=True)]
    )


def every_fifth(length: int, steps: Mapping[int, float]) -> list[float | None]:
    return [each if number % 5 == 0 else None for number, each in enumerate(staircase(length, steps), start=1)]


def test_the_table_of_a_recorded_run() -> None:
    """FedHeN passed 83.4 % at round 225, 84.4 % at 270 and 87.5 % at 395, of 400 rounds evaluated every 5."""
    curves = {
        "simple": every_fifth(400, {225: 0.8341, 270: 0.8445, 400: 0.859}),
        "complex": every_fifth(400, {395: 0.8752, 400: 0.8749}),
    }
    table = tables([federated("cifar10-iid", "fedhen", curves)])["table-1"]
    found = cells(table)
    assert found["simple", "CIFAR-10", "84.4 %"] == ("270 (289)", "not run (943)", "not run (805)", "– (2.8×)")
    assert found["simple", "CIFAR-10", "83.4 %"] == ("225 (249)", "not run (731)", "not run (669)", "– (2.7×)")
    assert found["complex", "CIFAR-10", "88.5 %"] == ("not reached (649)", *found["complex", "CIFAR-10", "88.5 %"][1:])
    assert found["complex", "CIFAR-10", "87.5 %"][0] == "395 (456)"
    assert found["simple", "CIFAR-100", "46.4 %"] == tuple(
        f"not run ({value})" for value in ("296", "864", "984", "2.9×")
    )
    assert any("every 5 rounds" in note and "up to 4 rounds earlier" in note for note in table.notes)
    assert any(note.startswith("–") for note in table.notes)


def test_unfinished_and_missed_targets_say_so() -> None:
    curves = {"simple": staircase(455, {200: 0.834}), "complex": staircase(455, {})}
    runs = [
        from_the_paper("cifar10-iid", "fedhen"),
        federated("cifar10-iid", "noside", curves, planned=1000, evaluation={"every": 1}),
        federated("cifar10-iid", "decouple", {tier: [0.1] * 1000 for tier in curves}, evaluation={"every": 1}),
        federated("cifar100-iid", "fedhen", {tier: [None] * 3 for tier in curves}, planned=1000),
    ]
    found = cells(tables(runs)["table-1"])
    # 455 / 289 = 1.57, rounded down; at 88.5 % FedHeN took 649, more than NoSide has had
    assert found["simple", "CIFAR-10", "84.4 %"] == (
        "289 (289)",
        "not reached (943)",
        "unfinished (round 455) (805)",
        "> 1.5× (2.8×)",
    )
    # a reached target counts although the run is unfinished; 200 / 249 = 0.80
    assert found["simple", "CIFAR-10", "83.4 %"] == ("249 (249)", "not reached (731)", "200 (669)", "0.8× (2.7×)")
    assert found["complex", "CIFAR-10", "88.5 %"][-1] == "– (1.4×)"
    assert found["simple", "CIFAR-100", "46.4 %"][0] == "unfinished (round 3) (296)"
    assert any("455 of 1000 rounds" in text for text in select_runs(runs).warnings)


def test_several_seeds_give_mean_deviation_and_n() -> None:
    runs = [from_the_paper("cifar10-iid", "fedhen", seed, shift) for seed, shift in enumerate((-10, 0, 10))]
    runs += [from_the_paper("cifar10-iid", "decouple", 0), from_the_paper("cifar10-iid", "noside", 0, -105)]
    runs += [federated("cifar10-iid", "decouple", {t: [0.1] * 1000 for t in ("simple", "complex")}, seed=1)]
    runs += [from_the_paper("cifar100-iid", "fedhen")]
    table = tables(runs)["table-1"]
    assert table.columns[2:] == ("FedHeN (n = 1 or 3)", "Decouple (n = 2)", "NoSide (n = 1)", "Gain")
    # 279, 289, 299; 805 - 105 = 700, and 700 / 289 = 2.42
    assert cells(table)["simple", "CIFAR-10", "84.4 %"] == (
        "289.0 ± 10.0 (289)",
        "1 of 2 reached (943)",
        "700 (805)",
        "2.4× (2.8×)",
    )
    assert any("standard deviation" in note for note in table.notes)


def test_bytes_to_the_papers_targets(all_runs: list[Run]) -> None:
    """Two tiers, down and up, 1 MB each: 4 MB a round."""
    found = cells(tables(all_runs)["table-1-bytes"])
    assert found["simple", "CIFAR-10", "84.4 %"] == ("1.16 GB", "3.77 GB", "3.22 GB", "2.8×")  # 289, 943, 805 rounds
    assert found["simple", "CIFAR-10", "83.4 %"] == ("996 MB", "2924 MB", "2676 MB", "2.7×")  # 249, 731, 669 rounds
    partial = tables([from_the_paper("cifar10-iid", "fedhen")])
    assert cells(partial["table-1-bytes"])["complex", "CIFAR-100", "45.8 %"] == ("not run",) * 4
    assert "table-2-bytes" not in partial


def test_auto_targets_follow_the_papers_rule_where_all_methods_are_finished(all_runs: list[Run]) -> None:
    steps = {
        "fedhen": {100: 0.80, 300: 0.8701, 900: 0.90},
        "decouple": {100: 0.80, 800: 0.8599, 900: 0.8690, 901: 0.85},
        "noside": {100: 0.80, 600: 0.8701, 900: 0.8777},
    }
    runs = [
        federated("cifar10-noniid", method, {tier: staircase(1000, each) for tier in ("simple", "complex")})
        for method, each in steps.items()
    ]
    table = tables([*runs, from_the_paper("cifar100-noniid", "fedhen")])["table-2-auto"]
    # the worst method's best is Decouple's 86.90 %; the best other method is NoSide, 600 / 300 = 2
    expected = {"86.9 %": ("300", "900", "600", "2.0×"), "85.9 %": ("300", "800", "600", "2.0×")}
    assert cells(table) == {(t, "CIFAR-10", a): row for t in ("simple", "complex") for a, row in expected.items()}
    assert any("CIFAR-100: not all methods are finished" in note for note in table.notes)
    # runs that stop at the paper's targets reproduce them
    again = cells(tables(all_runs)["table-1-auto"])
    assert again["simple", "CIFAR-10", "84.4 %"] == ("289", "943", "805", "2.8×")
    assert again["complex", "CIFAR-100", "45.8 %"] == ("376", "752", "472", "1.3×")
    assert not {"table-1-auto", "table-2-auto"} & set(tables([]))


def test_best_accuracies_beside_what_the_paper_says() -> None:
    def run(recipe: str, method: str, best: float, seed: int = 0, **changes: Any) -> Run:
        """Falls again after its best round; the complex model is half as good."""
        curve = staircase(1000, {500: best, 1000: 0.1})
        return federated(
            recipe, method, {"simple": curve, "complex": [each / 2 for each in curve]}, seed=seed, **changes
        )

    runs = [
        *(run("cifar10-iid", "fedhen", best, seed) for seed, best in enumerate((0.88, 0.90))),
        run("cifar10-iid", "decouple", 0.85),
        run("cifar10-iid", "noside", 0.86),
        run("cifar100-noniid", "fedhen", 0.6),
        run("cifar100-noniid", "noside", 0.7, planned=2000),
        one_place("cifar10", "simple", 1.0, staircase(100, {50: 0.9, 100: 0.875})),
        one_place("cifar10", "complex", 0.5, staircase(100, {1: 0.9})),
    ]
    found = cells(tables(runs)["accuracies"])
    assert SEEDS in tables(runs)["accuracies"].notes[-1] and SEEDS not in tables(runs[2:])["accuracies"].notes[-1]
    # 88 and 90 %: mean 89, deviation the square root of 2; 89 - 86 = 3
    assert found["simple", "CIFAR-10", "IID"] == ("89.00 ± 1.41 (88.6)", "85.00", "86.00", "3.0", "87.50 (86)")
    assert found["complex", "CIFAR-10", "IID"] == ("44.50 ± 0.71 (89.6)", "42.50", "43.00", "1.5 (> 1)", "not run (93)")
    assert found["simple", "CIFAR-10", "non-IID"] == ("not run", "not run", "not run", "–", "87.50 (86)")
    assert found["simple", "CIFAR-100", "non-IID"] == (
        "60.00",
        "not run",
        "unfinished (round 1000)",
        "–",
        "not run (63.2)",
    )
    assert len(found) == 8


def test_the_best_of_a_damaged_run_is_not_known() -> None:
    whole = [federated("cifar10-iid", method, {"simple": [0.5, 0.6], "complex": [0.5, 0.7]}) for method in METHODS]
    torn = [whole[0], replace(whole[1], damage=("rounds.jsonl is damaged from line 3 on",)), whole[2]]
    found = cells(tables(torn)["accuracies"])["simple", "CIFAR-10", "IID"]
    assert found == ("60.00 (88.6)", "damaged", "60.00", "–", "not run (86)")
    assert cells(tables(whole)["accuracies"])["simple", "CIFAR-10", "IID"][1:4] == ("60.00", "60.00", "0.0")


def test_the_servers_best_accuracies_are_its_own() -> None:
    run = federated("cifar10-iid", "fedhen", {"simple": [0.5, 0.6], "complex": [0.5, 0.7]})
    run.rounds[0].accuracy["server"]["simple"] = 0.65
    assert cells(tables([run], "server")["accuracies"])["simple", "CIFAR-10", "IID"][0] == "65.00 (88.6)"
    assert cells(tables([run])["accuracies"])["simple", "CIFAR-10", "IID"][0] == "60.00 (88.6)"


def test_centralised_references_beside_the_papers() -> None:
    runs = [
        one_place("cifar10", "complex", 1.0, staircase(100, {90: 0.9412, 100: 0.9405})),
        one_place("cifar10", "simple", 0.5, staircase(100, {100: 0.85}), seed=0),
        one_place("cifar10", "simple", 0.5, staircase(100, {100: 0.87}), seed=1),
        one_place("cifar100", "simple", 1.0, [0.1] * 37),
    ]
    runs[0].rounds[-1].accuracy["devices"]["complex"] = 0.1  # the server's model is the one
    table = tables(runs)["centralised"]
    assert table.columns == ("Dataset", "Training data", "Final, %", "Best, %")
    assert cells(table) == {
        ("simple", "CIFAR-10", "all"): ("not run (86)", "–"),
        ("simple", "CIFAR-10", "half"): ("86.00 ± 1.41 (84.5)", "86.00 ± 1.41"),  # 85 and 87: √2
        ("simple", "CIFAR-100", "all"): ("unfinished (round 37) (63.2)", "–"),
        ("simple", "CIFAR-100", "half"): ("not run (55.7)", "–"),
        ("complex", "CIFAR-10", "all"): ("94.05 (93)", "94.12"),
        ("complex", "CIFAR-10", "half"): ("not run (90.5)", "–"),
        ("complex", "CIFAR-100", "all"): ("not run (73.5)", "–"),
        ("complex", "CIFAR-100", "half"): ("not run (62.6)", "–"),
    }
    assert any("n = 1 or 2" in note for note in table.notes)


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


def test_how_the_runs_ended_is_listed_by_recipe(all_runs: list[Run]) -> None:
    found = make_outcome_tables(select_runs(all_runs))
    assert [table.title for table in found][:2] == [
        "cifar10-iid: accuracy, size and effort",
        "cifar100-iid: accuracy, size and effort",
    ]
    assert found[0].columns == ("Measure", *METHODS)
    assert found[0].groups[0].rows[1] == ("all devices, best, %", "84.40", "84.40", "84.40")


def drawn(runs: Sequence[Run]) -> list[tuple[PaperFigure, Figure]]:
    return [(each, each.draw(each.rows)) for each in make_figures(select_runs(runs), "devices")]


def test_figures_are_arranged_as_in_the_paper(all_runs: list[Run]) -> None:
    titles = [[axis.get_title() for axis in figure.axes] for _, figure in drawn(all_runs)]
    assert titles == [
        ["CIFAR-10 IID, simple model", "CIFAR-10 IID, complex model"],
        ["CIFAR-10 non-IID, simple model", "CIFAR-10 non-IID, complex model"],
        [f"CIFAR-100 {split}, {tier} model" for split in ("IID", "non-IID") for tier in ("simple", "complex")],
    ]


def test_curves_targets_and_references_are_drawn_where_they_belong(all_runs: list[Run]) -> None:
    (_, figure), *_ = drawn(all_runs)
    simple = figure.axes[0]
    curves, levels = simple.lines[:3], simple.lines[3:]
    assert [line.get_color() for line in curves] == [choose_looks([method])[method][0] for method in METHODS]
    assert curves[0].get_zorder() > curves[1].get_zorder() > curves[2].get_zorder()
    assert curves[0].get_ydata()[288] == pytest.approx(84.4)  # type: ignore[index]
    assert curves[0].get_xdata()[288] == 289  # type: ignore[index]
    assert [line.get_ydata()[0] for line in levels] == [84.4, 83.4, 75.0, 75.0]  # type: ignore[index]
    assert said(simple) == {"84.4", "83.4", "all data 75.0 (ours)", "half data 75.0 (ours)"}
    assert simple.get_xlim() == (0, 1000)
    ticks = [each for _, figure in drawn(all_runs) for axis in figure.axes for each in axis.get_yticks()]
    assert {each % 10 for each in ticks} == {0} and set(range(10, 91, 10)) <= set(ticks)


def said(axis: Any) -> set[str]:
    return {text.get_text() for text in [*axis.texts, *axis.get_legend().get_texts()]}


def test_figures_say_what_has_not_been_run() -> None:
    empty = [axis for _, figure in drawn([]) for axis in figure.axes]
    assert len(empty) == 8
    assert all("not run yet" in said(axis) for axis in empty)
    assert said(empty[1]) == {"not run yet", "88.5", "87.5", "all data 93.0 (paper)", "half data 90.5 (paper)"}
    partial = [
        from_the_paper("cifar10-iid", "fedhen"),
        federated("cifar10-iid", "noside", {"simple": [], "complex": []}, planned=1000),
    ]
    partial += [one_place("cifar10", "simple", 1.0, [0.88] * 100)]
    simple, complex_ = drawn(partial)[0][1].axes
    assert {"not run yet: Decouple", "not evaluated yet: NoSide", "all data 88.0 (ours)"} < said(simple)
    assert "all data 93.0 (paper)" in said(complex_)


@pytest.mark.parametrize("seeds", [0, 1, 2])
def test_nothing_is_cut_off_or_too_small_to_print(seeds: int) -> None:
    """At 5 inches and 100 dots an inch, whole and panel by panel: all text inside the image, none below 6 points."""
    runs = [from_the_paper(*place, seed, seed) for place in PAPER_RUNS[:3] for seed in range(seeds)]
    for each in make_figures(select_runs(runs), "devices"):
        for rows in (each.rows, [[each.rows[0][1]]]):
            figure = each.draw(rows)
            assert figure.get_figwidth() <= 5
            figure.set_dpi(100)
            figure.draw_without_rendering()
            for text in figure.findobj(Text):
                assert isinstance(text, Text)
                if not text.get_text():
                    continue
                box, where = text.get_window_extent(), (each.number, text.get_text())
                assert float(text.get_fontsize()) >= 6, where
                assert -1 <= box.x0 < box.x1 <= figure.bbox.x1 + 1, where
                assert -1 <= box.y0 < box.y1 <= figure.bbox.y1 + 1, where
            for axis in figure.axes:
                upper, lower = (text.get_window_extent() for text in axis.texts[:2])
                assert upper.y0 >= lower.y1


def test_all_files_are_written(all_runs: list[Run], tmp_path: Path) -> None:
    report = write_paper(all_runs, tmp_path / "new" / "folder")
    names = ["paper.html", "paper.md", "paper.tex"]
    names += [f"figure-{number}.{kind}" for number in (1, 2, 3) for kind in ("png", "svg")]
    assert [path.name for path in report.paths] == names
    assert sorted(names) == sorted(path.name for path in (tmp_path / "new/folder").iterdir())
    text = (tmp_path / "new/folder/paper.md").read_text(encoding="utf-8")
    assert "| CIFAR-10 | 84.4 % | 289 (289) | 943 (943) | 805 (805) | **2.8× (2.8×)** |" in text
    assert "|  | 83.4 % | 249 (249) | 731 (731) | 669 (669) | **2.7× (2.7×)** |" in text
    assert all(f"(figure-{number}.png)" in text for number in (1, 2, 3))
    assert "Finished: 12 of the paper’s 12 runs, and 8 of its 8 centralised references." in report.text
    assert max(map(len, report.text.splitlines())) <= 100


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    runs = [from_the_paper("cifar10-iid", "fedhen")]
    first, second = (write_paper(runs, tmp_path / name) for name in ("one", "two"))
    for one, two in zip(first.paths, second.paths, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name


def test_the_terminal_text_of_several_seeds_fits_in_100_columns(tmp_path: Path) -> None:
    runs = [from_the_paper(*place, seed, -20 * seed) for place in PAPER_RUNS for seed in range(3)]
    assert max(map(len, write_paper(runs, tmp_path).text.splitlines())) <= 100


def test_the_page_is_well_formed_and_needs_nothing_else(all_runs: list[Run], tmp_path: Path) -> None:
    write_paper(all_runs, tmp_path)
    page = Checker((tmp_path / "paper.html").read_text(encoding="utf-8"))
    assert [name for name, count in page.ids.items() if count > 1] == []
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    # the paper's, auto, bytes of two kinds, accuracies, centralised, a recipe each
    assert page.tags["table"] == 2 + 2 + 4 + 1 + 1 + 4
    assert page.tags["svg"] == 2 + 2 + 4
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == 0
    assert "1000 (1000)" in page.text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize("complete", [True, False])
def test_latex_is_balanced_and_its_rows_are_full(all_runs: list[Run], tmp_path: Path, complete: bool) -> None:
    write_paper(all_runs if complete else all_runs[:1], tmp_path)
    source = (tmp_path / "paper.tex").read_text(encoding="utf-8")
    assert source.startswith("% needs \\usepackage{booktabs,multirow,graphicx}")
    bare = re.sub(r"\\[{}&%]", "", source)
    assert bare.count("{") == bare.count("}")
    assert Counter(re.findall(r"\\begin\{(\w+)\}", source)) == Counter(re.findall(r"\\end\{(\w+)\}", source))
    tabulars = re.findall(r"\\begin\{tabular\}\{(l+r+)\}(.*?)\\end\{tabular\}", bare, flags=re.DOTALL)
    assert len(tabulars) == (14 if complete else 7)
    for columns, body in tabulars:
        rows = [row for row in body.split(r"\\") if "&" in row]
        assert rows
        assert {row.count("&") for row in rows} == {len(columns) - 1}
    assert r"\multirow{2}{*}{CIFAR-10} & 84.4 \% & 289 (289)" in source
    assert not set(re.sub(r"[“”]", "", source)) - set(map(chr, range(128)))


@pytest.mark.process
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
def test_latex_compiles(all_runs: list[Run], tmp_path: Path) -> None:
    write_paper(all_runs, tmp_path)
    (tmp_path / "main.tex").write_text(
        r"\documentclass{article}\usepackage{booktabs,multirow,graphicx}\begin{document}\input{paper}\end{document}"
    )
    subprocess.run(["pdflatex", "-halt-on-error", "main.tex"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


def test_the_servers_models_are_reported_on_request(tmp_path: Path) -> None:
    run = from_the_paper("cifar10-iid", "fedhen")
    run.rounds[99].accuracy["server"]["simple"] = 0.9
    table = tables([run], owner="server")["table-1"]
    assert cells(table)["simple", "CIFAR-10", "84.4 %"][0] == "100 (289)"
    assert "server model" in table.meaning
    assert "all-devices average" in table.notes[0]
    with pytest.raises(UserError, match="unknown owner 'servers'"):
        write_paper([run], tmp_path, owner="servers")


def test_names_from_files_cannot_inject_markup(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>'
    run = replace(from_the_paper("cifar10-iid", "fedhen"), folder=Path(evil.replace("/", "")), summary=None)
    run.environment["gpu"] = evil
    write_paper([run], tmp_path)
    page = Checker((tmp_path / "paper.html").read_text(encoding="utf-8"))
    assert page.tags["script"] == 0
    assert evil in page.text


def test_from_a_folder_from_no_runs_and_into_a_path_that_is_a_file(tmp_path: Path) -> None:
    folder = write_folder(from_the_paper("cifar10-iid", "fedhen"), tmp_path / "runs" / "fedhen")
    config = replace(load_recipe("cifar10-iid"), method="fedhen")
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    report = write_paper([read_run(folder)], tmp_path / "paper")
    assert "289 (289)" in report.text
    assert "Finished: 1 of the paper’s 12 runs" in report.text
    assert "Finished: 0 of the paper’s 12 runs" in write_paper([], tmp_path / "empty").text
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        write_paper([], tmp_path / "file")


@pytest.mark.process
def test_it_needs_no_torch_and_its_tables_no_matplotlib() -> None:
    blocked = (
        "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None\n"
        "from fedhen.reports.paper.selection import select_runs\n"
        "from fedhen.reports.paper.tables import make_paper_tables\n"
        "assert len(make_paper_tables(select_runs([]), 'devices')) == 2\n"
    )
    subprocess.run([sys.executable, "-c", blocked], check=True)
