"""Targets, costs and gains. Every expected number is the paper's or derived in a comment next to it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

import pytest

from fedhen.errors import FedhenError
from fedhen.reports import auto_targets, compare, rounds_to_target
from fedhen.reports.comparison import list_warnings
from fedhen.reports.costs import BYTES, OWN_BYTES, ROUNDS, Cost, Measure, Outcome, choose_unit, gain
from fedhen.reports.outcome import make_outcome_table
from fedhen.reports.tables import make_cost_table
from fedhen.reports.targets import RequestedTargets, choose_targets
from fedhen.runs.reader import Run
from fedhen.runs.records import Timing
from support.report_fixtures import Curves, make_run, staircase

# The paper's two tables: tier -> (accuracy, FedHeN, Decouple, NoSide, gain)
Rows = tuple[tuple[float, int, int, int, str], ...]
PAPER: dict[str, dict[str, Rows]] = {
    "cifar10-iid": {
        "simple": ((84.4, 289, 943, 805, "2.8×"), (83.4, 249, 731, 669, "2.7×")),
        "complex": ((88.5, 649, 991, 941, "1.4×"), (87.5, 456, 739, 669, "1.5×")),
    },
    "cifar100-iid": {
        "simple": ((46.4, 296, 864, 984, "2.9×"), (45.4, 250, 588, 807, "2.4×")),
        "complex": ((46.8, 468, 963, 614, "1.3×"), (45.8, 376, 752, 472, "1.3×")),
    },
    "cifar10-non-iid": {
        "simple": ((79.4, 295, 986, 810, "2.7×"), (78.4, 256, 816, 676, "2.6×")),
        "complex": ((84.2, 596, 1000, 857, "1.4×"), (83.2, 519, 887, 751, "1.4×")),
    },
    "cifar100-non-iid": {
        "simple": ((43.8, 278, 978, 914, "3.3×"), (42.8, 239, 813, 762, "3.2×")),
        "complex": ((44.8, 450, 997, 498, "1.1×"), (43.8, 372, 754, 456, "1.2×")),
    },
}


def rows(
    runs: Sequence[Run], measure: Measure = ROUNDS, targets: RequestedTargets = None
) -> dict[str, list[tuple[str, ...]]]:
    comparison = compare(runs)
    table = make_cost_table(comparison, choose_targets(comparison, targets), "devices", measure)
    return {group.title.removesuffix(" model"): list(group.rows) for group in table.groups}


def reached(cost: float) -> Cost:
    return Cost(cost, Outcome.REACHED)


def missed(cost: float) -> Cost:
    return Cost(cost, Outcome.MISSED)


@pytest.mark.parametrize("recipe", PAPER)
def test_the_papers_rounds_give_the_papers_targets_and_gains(recipe: str) -> None:
    runs = []
    for place, method in enumerate(("fedhen", "decouple", "noside"), start=1):
        curves: Curves = {
            tier: staircase(1000, {int(row[place]): row[0] / 100 for row in table})
            for tier, table in PAPER[recipe].items()
        }
        runs.append(make_run(method, curves))
    for tier, table in PAPER[recipe].items():
        expected = [(f"{accuracy} %", *(str(n) for n in numbers), gain) for accuracy, *numbers, gain in table]
        assert rows(runs)[tier] == expected


def test_the_first_round_at_or_above_the_target_counts_even_if_the_next_falls_below() -> None:
    run = make_run("fedhen", {"simple": [0.5, 0.844, 0.7, 0.9]})
    assert rounds_to_target(run, "simple", 84.4) == 2
    assert rounds_to_target(run, "simple", 84.5) == 4
    assert rounds_to_target(run, "simple", 90.1) is None


def test_an_accuracy_of_exactly_the_target_reaches_it() -> None:
    for tenths in range(1, 1001):
        run = make_run("fedhen", {"simple": [tenths / 1000]})
        assert rounds_to_target(run, "simple", tenths / 10) == 1, tenths
        assert auto_targets([run], "simple")[0] == tenths / 10


def test_the_owner_chooses_whose_model_is_scored() -> None:
    run = make_run("fedhen", {"simple": [0.5, 0.6, 0.7]})
    run.rounds[0].accuracy["server"]["simple"] = 0.65
    assert rounds_to_target(run, "simple", 60, "devices") == 2
    assert rounds_to_target(run, "simple", 60, "server") == 1


def test_auto_targets_are_the_worst_runs_best_floored_and_one_below() -> None:
    runs = [make_run("fedhen", {"simple": [0.5, 0.9]}), make_run("noside", {"simple": [0.8469, 0.7]})]
    assert auto_targets(runs, "simple") == (84.6, 83.6)  # the worse best is 84.69 %
    assert auto_targets([make_run("fedhen", {"simple": [0.008]})], "simple") == (0.8,)  # 1.0 below it would be negative
    assert auto_targets([make_run("fedhen", {"simple": []}, planned=5)], "simple") == ()


def test_targets_are_the_users_then_the_configurations_then_by_rule() -> None:
    runs = [make_run("fedhen", {"simple": [0.5, 0.9], "complex": [0.3, 0.4]}, targets={"simple": [60.0, 80.0]})]
    chosen = choose_targets(compare(runs))
    assert (chosen["simple"].values, chosen["complex"].values) == ((80.0, 60.0), (40.0, 39.0))
    assert choose_targets(compare(runs), {"simple": [70]})["simple"].values == (70,)
    assert choose_targets(compare(runs), "auto")["simple"].values == (90.0, 89.0)
    with pytest.raises(FedhenError, match="unknown tier 'simpel': did you mean 'simple'"):
        choose_targets(compare(runs), {"simpel": [70]})
    with pytest.raises(FedhenError, match="at most 100"):
        choose_targets(compare(runs), {"simple": [700]})


def test_the_gain_is_a_lower_bound_if_no_baseline_reached_the_target() -> None:
    # 1000 / 289 = 3.46: rounding it to 3.5 would claim more than was seen
    assert gain([reached(289)], [[missed(1000)], [missed(1000)]]) == "> 3.4×"
    assert gain([reached(289)], [[missed(1000)], [reached(805)]]) == "2.8×"
    assert (
        gain([reached(100)], [[reached(1000)], [missed(300)]]) == "> 3.0×"
    )  # an unfinished run may still reach it in round 301
    assert gain([missed(1000)], [[reached(805)]]) == "–"
    assert gain([reached(500)], [[missed(300)]]) == "–"  # the other run is too short
    assert gain([reached(4)], [[reached(5)]]) == "1.3×"  # 1.25, half up
    assert gain([reached(10)], [[reached(8)]]) == "0.8×"


def test_gain_over_several_seeds_is_the_ratio_of_means() -> None:
    assert gain([reached(90), reached(110)], [[reached(240), reached(260)]]) == "2.5×"
    assert gain([reached(90), reached(110)], [[reached(240), missed(300)]]) == "> 2.7×"
    assert gain([reached(90), missed(300)], [[reached(240), reached(260)]]) == "–"


def test_cells_say_not_reached_not_yet_and_not_evaluated() -> None:
    runs = [
        make_run("fedhen", {"simple": [0.5, 0.8, 0.9, 0.9]}),
        make_run("noside", {"simple": [0.5, 0.6, 0.7, 0.7]}),
        make_run("decouple", {"simple": [0.5, 0.6]}, planned=4),
        make_run("other", {"simple": [None]}, planned=4),
    ]
    assert rows(runs, targets={"simple": [80]})["simple"] == [
        ("80.0 %", "2", "not reached", "not yet", "not evaluated", "–")
    ]
    assert rows(runs[:3], targets={"simple": [80]})["simple"][0][-1] == "> 1.0×"  # decouple has had 2 rounds, as fedhen
    assert rows(runs[:2], targets={"simple": [80]})["simple"][0][-1] == "> 2.0×"


def test_a_report_can_be_limited_to_the_first_rounds() -> None:
    """Later rounds change nothing. A run that has all of these rounds is complete, whatever was planned."""
    runs = [
        make_run("fedhen", {"simple": [0.5, 0.8, 0.9, 0.9]}),
        make_run("noside", {"simple": [0.5, 0.6, 0.8]}, planned=4),
        make_run("decouple", {"simple": [0.7]}, planned=4),
    ]
    runs[0].timing[2:] = [Timing(3, 9.0), Timing(4, 9.0)]
    cut = [run.truncate(2) for run in runs]
    assert rows(runs, targets={"simple": [80]})["simple"] == [("80.0 %", "2", "3", "not yet", "–")]
    assert rows(cut, targets={"simple": [80]})["simple"] == [("80.0 %", "2", "not reached", "not yet", "–")]
    assert rows(cut[:2], targets={"simple": [80]})["simple"] == [("80.0 %", "2", "not reached", "> 1.0×")]
    effort = {row[0]: row[1:] for group in make_outcome_table(compare(cut)).groups for row in group.rows}
    assert effort["all devices, final, %"] == ("80.00", "60.00", "70.00")
    assert effort["rounds"] == ("2", "2", "1 of 2")
    assert effort["bytes sent"] == ("4.00 MB", "4.00 MB", "2.00 MB")
    assert effort["seconds a round (median)"] == ("1.50", "1.50", "1.50")
    assert list_warnings(compare(cut)) == [
        "Only the first 2 of 4 rounds are used: fedhen-0, noside-0, decouple-0.",
        "Unfinished: decouple, seed 0 (decouple-0), 1 of 2 rounds recorded; its numbers can still change.",
    ]


def test_a_run_within_the_limit_is_reported_whole() -> None:
    short, long = make_run("noside", {"simple": [0.5, 0.6]}), make_run("fedhen", {"simple": [0.5, 0.6, 0.7, 0.8]})
    assert short.truncate(2) is short and short.truncate(3) is short
    said = list_warnings(compare([short.truncate(3), long.truncate(3)]))
    assert said == [
        "Only the first 3 of 4 rounds are used: fedhen-0.",
        "The runs differ in more than method and seed: rounds is 3 or 2.",
    ]
    sparse = make_run("fedhen", {"simple": [None, None, 0.5]}).truncate(2)
    assert list_warnings(compare([sparse]))[1:] == [
        "No evaluated round: fedhen, seed 0 (fedhen-0), 2 of 2 rounds recorded."
    ]


def test_bytes_are_all_that_was_sent_until_the_round() -> None:
    # two tiers, 1 MB each down and up: 4 MB a round
    runs = [
        make_run("fedhen", {"simple": staircase(500, {3: 0.9}), "complex": staircase(500, {2: 0.9})}),
        make_run("noside", {"simple": staircase(500, {30: 0.9}), "complex": staircase(500, {500: 0.9})}),
    ]
    runs[0].rounds[1].bytes["up"]["simple"] = 3_500_000  # and 2.5 MB more in round 2
    assert rows(runs, BYTES, {"simple": [90], "complex": [90]}) == {
        "simple": [("90.0 %", "14.5 MB", "120 MB", "8.3×")],  # 120 / 14.5 = 8.28
        "complex": [("90.0 %", "10.5 MB", "2000 MB", "190.5×")],  # one unit in a row; 2000 / 10.5 = 190.48
    }
    # a tier's own devices: 2 MB a round, and those 2.5 MB are the simple ones'
    assert rows(runs, OWN_BYTES, {"simple": [90], "complex": [90]}) == {
        "simple": [("90.0 %", "8.50 MB", "60.0 MB", "7.1×")],  # 3 · 2 + 2.5; 60 / 8.5 = 7.06
        "complex": [("90.0 %", "4.00 MB", "1000 MB", "250.0×")],
    }


@pytest.mark.parametrize(
    ("amount", "expected"),
    [(999, (1, "B")), (1e3, (1e3, "kB")), (5e6, (1e6, "MB")), (2e9, (1e9, "GB")), (3e15, (1e12, "TB"))],
)
def test_units_are_decimal(amount: float, expected: tuple[float, str]) -> None:
    assert choose_unit(amount) == expected


def test_several_seeds_give_mean_and_standard_deviation() -> None:
    curves = [staircase(60, {n: 0.9}) for n in (10, 12, 20)]
    runs = [make_run("fedhen", {"simple": curve}, seed=seed) for seed, curve in enumerate(curves)]
    runs += [make_run("noside", {"simple": staircase(60, {n: top})}, seed=n) for n, top in ((40, 0.9), (50, 0.8))]
    comparison = compare(runs)
    table = make_cost_table(comparison, choose_targets(comparison, {"simple": [90, 80]}), "devices", ROUNDS)
    own = f"{mean([10, 12, 20]):.1f} ± {stdev([10, 12, 20]):.1f}"
    assert own == "14.0 ± 5.3"
    assert table.columns == ("Accuracy", "fedhen (n = 3)", "noside (n = 2)", "Gain")
    # 90 %: seed 50 spent 60 rounds in vain, so at least (40 + 60) / 2 / 14 = 3.57; 80 %: (40 + 50) / 2 / 14 = 3.21
    assert table.groups[0].rows == (
        ("90.0 %", own, "1 of 2 reached", "> 3.5×"),
        ("80.0 %", own, f"45.0 ± {stdev([40, 50]):.1f}", "3.2×"),
    )
    assert any("standard deviation" in note for note in table.notes)


def test_outcome_table_by_hand() -> None:
    run = make_run("fedhen", {"simple": [0.5, 0.9, 0.8123]})
    run.rounds[0].dropped.extend([4, 5])
    run.rounds[2].dropped.append(4)
    run.rounds[2].accuracy["server"]["simple"] = 0.95
    run.timing[:] = [Timing(1, 60.0), Timing(2, 2.0), Timing(3, 3.0)]  # the first round is slow to start
    cells = {row[0]: row[1] for group in make_outcome_table(compare([run])).groups for row in group.rows}
    assert cells == {
        "all devices, final, %": "81.23",
        "all devices, best, %": "90.00",
        "server, final, %": "95.00",
        "server, best, %": "95.00",
        "parameters": "1,000",
        "rounds": "3",
        "bytes sent": "6.00 MB",
        "devices dropped": "3",
        "seconds a round (median)": "3.00",
    }


def test_sparse_evaluation_is_reported() -> None:
    run = make_run("fedhen", {"simple": [None, None, None, None, 0.8]}, evaluation={"every": 5})
    comparison = compare([run])
    notes = make_cost_table(comparison, choose_targets(comparison), "devices", ROUNDS).notes
    assert any("every 5 rounds" in note and "up to 4 rounds earlier" in note for note in notes)
    every_round = compare([make_run("fedhen", {"simple": [0.8]})])
    assert not any(
        "every" in note for note in make_cost_table(every_round, choose_targets(every_round), "devices", ROUNDS).notes
    )
