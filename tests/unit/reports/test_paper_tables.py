"""The paper's tables: every expected number is the paper's or derived in a comment next to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fedhen.reports.costs import Cost, Outcome, gain
from fedhen.reports.names import SEEDS
from fedhen.reports.paper.selection import select_runs
from fedhen.reports.paper.tables import make_outcome_tables
from fedhen.reports.paper.values import METHODS
from fedhen.reports.rendering import Table
from fedhen.runs.reader import Run
from support.paper_runs import cells, federated, from_the_paper, make_all_runs, one_place, tables
from support.report_fixtures import staircase

# The rows of the paper's tables from top to bottom, as its source has them
TABLE_1 = """
84.4 & 289 & 943 & 805 & 2.8  83.4 & 249 & 731 & 669 & 2.7  46.4 & 296 & 864 & 984 & 2.9  45.4 & 250 & 588 & 807 & 2.4
88.5 & 649 & 991 & 941 & 1.4  87.5 & 456 & 739 & 669 & 1.5  46.8 & 468 & 963 & 614 & 1.3  45.8 & 376 & 752 & 472 & 1.3
"""
TABLE_2 = """
79.4 & 295 & 986 & 810 & 2.7  78.4 & 256 & 816 & 676 & 2.6  43.8 & 278 & 978 & 914 & 3.3  42.8 & 239 & 813 & 762 & 3.2
84.2 & 596 & 1000 & 857 & 1.4  83.2 & 519 & 887 & 751 & 1.4  44.8 & 450 & 997 & 498 & 1.1  43.8 & 372 & 754 & 456 & 1.2
"""


def printed(table: str) -> list[tuple[str, ...]]:
    return [tuple(row.split(" & ")) for row in re.split(r"  |\n", table.strip())]


@pytest.fixture(scope="module")
def all_runs() -> list[Run]:
    return make_all_runs()


@pytest.fixture(scope="module")
def all_tables(all_runs: list[Run]) -> dict[str, Table]:
    return tables(all_runs)


@pytest.mark.parametrize("row", [*printed(TABLE_1), *printed(TABLE_2)], ids="-".join)
def test_the_papers_sixteen_gains_follow_from_its_rounds(row: tuple[str, ...]) -> None:
    _, *rounds, expected = row
    hero, *baselines = [[Cost(int(each), Outcome.REACHED)] for each in rounds]
    assert gain(hero, baselines) == f"{expected}×"


@pytest.mark.parametrize(("name", "source"), [("table-1", TABLE_1), ("table-2", TABLE_2)])
def test_the_papers_value_stands_beside_ours_in_every_cell(
    all_tables: dict[str, Table], name: str, source: str
) -> None:
    """Runs that take the paper's rounds: each cell has the same number twice, also the recomputed gains."""
    ran, empty = all_tables[name], tables([])[name]
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


@pytest.mark.slow
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


def test_bytes_to_the_papers_targets(all_tables: dict[str, Table]) -> None:
    """Two tiers, down and up, 1 MB each: 4 MB a round."""
    found = cells(all_tables["table-1-bytes"])
    assert found["simple", "CIFAR-10", "84.4 %"] == ("1.16 GB", "3.77 GB", "3.22 GB", "2.8×")  # 289, 943, 805 rounds
    assert found["simple", "CIFAR-10", "83.4 %"] == ("996 MB", "2924 MB", "2676 MB", "2.7×")  # 249, 731, 669 rounds
    partial = tables([from_the_paper("cifar10-iid", "fedhen")])
    assert cells(partial["table-1-bytes"])["complex", "CIFAR-100", "45.8 %"] == ("not run",) * 4
    assert "table-2-bytes" not in partial


def test_auto_targets_follow_the_papers_rule_where_all_methods_are_finished(all_tables: dict[str, Table]) -> None:
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
    again = cells(all_tables["table-1-auto"])
    assert again["simple", "CIFAR-10", "84.4 %"] == ("289", "943", "805", "2.8×")
    assert again["complex", "CIFAR-100", "45.8 %"] == ("376", "752", "472", "1.3×")
    assert not {"table-1-auto", "table-2-auto"} & set(tables([]))


@pytest.mark.slow
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
    table = tables(runs)["accuracies"]
    found = cells(table)
    assert SEEDS in table.notes[-1] and SEEDS not in tables(runs[2:])["accuracies"].notes[-1]
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


@pytest.mark.slow
def test_how_the_runs_ended_is_listed_by_recipe(all_runs: list[Run]) -> None:
    found = make_outcome_tables(select_runs(all_runs))
    assert [table.title for table in found][:2] == [
        "cifar10-iid: accuracy, size and effort",
        "cifar100-iid: accuracy, size and effort",
    ]
    assert found[0].columns == ("Measure", *METHODS)
    assert found[0].groups[0].rows[1] == ("all devices, best, %", "84.40", "84.40", "84.40")
