"""Reports. Every expected number is the paper's or derived in a comment next to it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from xml.etree import ElementTree

import pytest

from fedhen.errors import UserError
from fedhen.reports import auto_targets, compare, rounds_to_target, write_report
from fedhen.reports.comparison import list_warnings
from fedhen.reports.costs import BYTES, OWN_BYTES, ROUNDS, Cost, Measure, Outcome, byte_unit, gain
from fedhen.reports.curves import average_curves, choose_looks
from fedhen.reports.outcome import make_outcome_table
from fedhen.reports.rendering import Group, Table, to_latex, to_markdown, to_text
from fedhen.reports.tables import make_cost_table, make_tables
from fedhen.reports.targets import RequestedTargets, choose_targets
from fedhen.runs.reader import Run, read_run
from fedhen.runs.records import Timing
from support.pages import Checker
from support.report_fixtures import Curves, make_run, staircase, write_folder

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
    with pytest.raises(UserError, match="unknown tier 'simpel': did you mean 'simple'"):
        choose_targets(compare(runs), {"simpel": [70]})
    with pytest.raises(UserError, match="at most 100"):
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
    assert byte_unit(amount) == expected


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


def test_the_highlighted_method_comes_first_and_can_be_any() -> None:
    runs = [make_run(method, {"simple": [0.5]}) for method in ("noside", "mine", "fedhen")]
    assert compare(runs).methods == ("fedhen", "noside", "mine")
    assert compare(runs, hero="mine").methods == ("mine", "noside", "fedhen")
    assert compare(runs[:2]).methods == ("noside", "mine")


def test_what_cannot_be_compared_is_refused_in_one_line() -> None:
    run = make_run("fedhen", {"simple": [0.5]})
    twin = replace(run, folder=Path("runs/again"))
    with pytest.raises(UserError, match="two runs of fedhen with seed 0: runs/fedhen-0 and runs/again"):
        compare([run, twin])
    with pytest.raises(UserError, match=r"different recipes.*runs/fedhen-0 is made-up, runs/noside-0 is another"):
        compare([run, make_run("noside", {"simple": [0.5]}, recipe="another")])
    with pytest.raises(UserError, match="different tiers"):
        compare([run, make_run("noside", {"small": [0.5]})])
    with pytest.raises(UserError, match="at least one run"):
        compare([])
    with pytest.raises(UserError, match="unknown owner 'device'"):
        write_report([run], Path("unused"), owner="device")


def test_runs_of_a_method_that_differ_in_a_setting_have_a_column_each() -> None:
    def variant(steps: dict[int, float], seed: int = 0, method: str = "noside", **config: Any) -> Run:
        return make_run(method, {"simple": staircase(10, steps)}, seed=seed, **config)

    usual, other = {"lr": 0.1, "clip": 10.0}, {"lr": 0.2, "clip": 10.0}
    runs = [
        variant({4: 0.8}, training=usual),
        variant({2: 0.8}, training=other, checkpoint={"minutes": 1.0}),
        variant({6: 0.8}, seed=1, training=usual),
        variant({3: 0.8}, seed=1, training=other, planned=20),
    ]
    comparison = compare(runs)
    assert {name: [run.seed for run in each] for name, each in comparison.by_method.items()} == {
        "noside": [0, 1],
        "noside (lr=0.2)": [0, 1],
    }
    table = make_cost_table(comparison, choose_targets(comparison, {"simple": [80.0]}), "devices", ROUNDS)
    # There is no gain over a method's own variants.
    assert table.columns == ("Accuracy", "noside (n = 2)", "noside (lr=0.2) (n = 2)")
    assert table.groups[0].rows[0][1:] == ("5.0 ± 1.4", "2.5 ± 0.7")
    told = [text for text in list_warnings(comparison) if not text.startswith("Unfinished")]
    assert told == [
        "Variants of noside, named by what they change; noside itself has training.lr = 0.1.",
        "The runs differ in more than method and seed: rounds is 10 or 20.",
    ]
    # Variants are found within each method, and differences between methods are still reported.
    with_hero = compare([*runs, variant({1: 0.8}, method="fedhen", training={"lr": 0.3, "clip": 5.0})])
    assert with_hero.methods == ("fedhen", "noside", "noside (lr=0.2)")
    assert with_hero.others == with_hero.methods[1:]
    said = "\n".join(list_warnings(with_hero))
    assert "training.clip is 5.0 or 10.0" in said and "training.lr is 0.3 or 0.1." in said
    table = make_cost_table(with_hero, choose_targets(with_hero, {"simple": [80.0]}), "devices", ROUNDS)
    assert table.columns[-1] == "Gain" and table.groups[0].rows[0][-1] == "2.5×"


LISTS = ({"model": {"widths": [8, 8, 16, 16]}}, {"model": {"widths": [4, 4, 8, 8]}})
VARIANTS: list[tuple[Sequence[dict[str, Any]], Sequence[str]]] = [
    # The way of execution counts only if nothing else differs.
    (({"runtime": {"precision": "bf16"}}, {"runtime": {"precision": "fp32"}}), ("mine", "mine (precision=fp32)")),
    (
        (
            {"model": {"groups": 2}, "runtime": {"threads": 1}},
            {"model": {"groups": 2}, "runtime": {"threads": 2}},
            {"model": {"groups": 4}, "runtime": {"threads": 1}},
        ),
        ("mine", "mine (threads=2)", "mine (groups=4)"),
    ),
    (
        (
            {"model": {"groups": 2}, "runtime": {"precision": "bf16"}},
            {"model": {"groups": 4}, "runtime": {"precision": "fp32"}},
        ),
        ("mine", "mine (groups=4)"),
    ),
    # Settings with the same last name keep their section.
    (({"training": {"batch_size": 8}}, {"training": {"batch_size": 9}}), ("mine", "mine (training.batch_size=9)")),
    # A table of free names is one setting, and may be empty.
    (
        ({"objective": {"exit_weights": {}}}, {"objective": {"exit_weights": {"simple": 0.5}}}),
        ("mine", "mine (exit_weights={simple=0.5})"),
    ),
    (LISTS, ("mine", "mine (widths=[4, 4, 8, 8])")),
    # A setting that an older run lacks has its default.
    (({"model": {"groups": 2}}, {"model": {"groups": 4}, "training": {"lr_warmup": 0}}), ("mine", "mine (groups=4)")),
    # The variant nearest to the recipe has the plain name, whatever the order.
    (({"recipe": "digits", "model": {"groups": 4}}, {"recipe": "digits"}), ("mine", "mine (groups=4)")),
]


@pytest.mark.parametrize(("configs", "names"), VARIANTS)
def test_variants_are_named_by_what_tells_them_apart(configs: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    assert compare([make_run("mine", {"simple": [0.5]}, **config) for config in configs]).methods == names


def test_runs_that_differ_in_how_they_were_saved_alone_are_the_same() -> None:
    runs = [make_run("mine", {"simple": [0.5]}, checkpoint={"minutes": minutes}) for minutes in (1.0, 5.0)]
    with pytest.raises(UserError, match="two runs of mine with seed 0"):
        compare(runs)


def test_differing_settings_and_unfinished_runs_are_warned_of() -> None:
    runs = [
        make_run("fedhen", {"simple": [0.5]}, training={"lr": 0.1, "epochs": 5}),
        make_run("noside", {"simple": [0.5]}, planned=9, training={"lr": 0.2, "epochs": 5}),
    ]
    said = "\n".join(list_warnings(compare(runs)))
    assert "noside, seed 0 (noside-0), 1 of 9 rounds" in said
    assert "training.lr is 0.1 or 0.2" in said
    assert "epochs" not in said
    assert list_warnings(compare(runs[:1])) == []


def test_curves_have_the_mean_and_the_range_of_the_seeds() -> None:
    runs = [
        make_run("fedhen", {"simple": [0.2, 0.4, 0.6]}, seed=0),
        make_run("fedhen", {"simple": [0.4, 0.5]}, seed=1, planned=3),
        make_run("fedhen", {"simple": []}, seed=2, planned=3),
    ]
    drawn = average_curves(runs, "simple", "devices", BYTES.spent)
    assert drawn.spent == [2_000_000, 4_000_000]  # only one seed has round 3
    assert drawn.mean == pytest.approx([30, 45])
    assert (drawn.low, drawn.high) == ([20, 40], [40, 50])


def test_a_method_looks_the_same_everywhere_and_unlike_the_others() -> None:
    names = ["fedhen", "noside", "decouple", "fedprox", "scaffold", "feddyn", "heterofl"]
    everything = choose_looks(names)
    assert choose_looks(["noside"])["noside"] == choose_looks(["scaffold", "noside"])["noside"] == everything["noside"]
    assert choose_looks(names[::-1]) == everything
    assert len(set(everything.values())) == len(names)
    for one, two in combinations(names, 2):
        assert not set(map(str, everything[one])) & set(map(str, everything[two])), (one, two)


TABLE = Table(
    name="made-up",
    title="A | <b>title</b>",
    columns=("Accuracy", "a_b", "Gain"),
    groups=(Group("x & y", (("80.0 %", "12 ± 3", "> 2.0×"),)),),
    meaning="Fewer is better.",
    notes=("A note.",),
    strong="Gain",
)


def test_table_as_text() -> None:
    assert to_text(TABLE) == (
        "A | <b>title</b>\n"
        "──────────────────────────\n"
        "  Accuracy     a_b    Gain\n"
        "──────────────────────────\n"
        "x & y\n"
        "  80.0 %    12 ± 3  > 2.0×\n"
        "──────────────────────────\n"
        "A note.\n"
    )
    assert "\x1b" not in to_text(replace(TABLE, title="\x1b[31mred"))


def test_table_as_markdown() -> None:
    lines = to_markdown(TABLE).splitlines()
    assert lines[0] == r"## A \| \<b>title\</b>"
    assert lines[4:8] == [
        r"| Accuracy | a\_b | Gain |",
        "| :--- | ---: | ---: |",
        r"| **x \& y** |  |  |",
        "| 80.0 % | 12 ± 3 | **> 2.0×** |",
    ]


def test_table_as_latex() -> None:
    text = to_latex(TABLE)
    assert r"80.0 \% & 12 $\pm$ 3 & \textbf{$>$ 2.0$\times$} \\" in text
    assert r"\multicolumn{3}{l}{\textit{x \& y}} \\" in text
    assert r"Accuracy & a\_b & \textbf{Gain} \\" in text
    assert text.count(r"\begin") == text.count(r"\end") == 2


def three_methods(tiers: Sequence[str] = ("simple", "complex")) -> list[Run]:
    tops = {"noside": 0.8, "fedhen": 0.9, "decouple": 0.7}
    return [
        make_run(method, {tier: [top * n / 20 for n in range(1, 21)] for tier in tiers}) for method, top in tops.items()
    ]


def test_the_page_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    report = write_report(three_methods(), tmp_path)
    page = Checker((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [name for name, count in page.ids.items() if count > 1] == []
    assert page.links
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert page.tags["table"] == 4
    assert page.tags["svg"] == 4  # two tiers, over rounds and over bytes
    assert page.tags["script"] == page.tags["link"] == page.tags["img"] == 0
    assert "made-up: fedhen, noside and decouple" in page.text
    assert "Unfinished" not in page.text
    assert report.paths[0] == tmp_path / "report.html"


def test_all_files_are_written_and_sane(tmp_path: Path) -> None:
    report = write_report(three_methods(("tiny", "small", "medium", "large")), tmp_path / "new" / "folder")
    assert sorted(path.name for path in report.paths) == sorted(
        path.name for path in (tmp_path / "new/folder").iterdir()
    )
    assert len(report.paths) == 7
    for path in report.paths:
        if path.suffix == ".png":
            content = path.read_bytes()
            assert content.startswith(b"\x89PNG\r\n\x1a\n")
            width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
            assert 1500 < width < 3000
            assert 300 < height < 1000
            assert len(content) > 20_000
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
    for name in ("tiny", "small", "medium", "large"):
        assert f"{name} model" in report.text


def test_the_terminal_text_fits_in_100_columns(tmp_path: Path) -> None:
    runs = [replace(run, config={**run.config, "seed": seed}) for run in three_methods() for seed in range(3)]
    assert max(map(len, write_report(runs, tmp_path).text.splitlines())) <= 100


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write_report(three_methods(), tmp_path / name) for name in ("one", "two"))
    for one, two in zip(first.paths, second.paths, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name


def test_names_from_files_cannot_inject_markup(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>$x_{&'
    runs = [
        make_run(evil, {evil: [0.5, 0.6]}, recipe=evil, training={evil: evil}),
        make_run("noside", {evil: [0.4]}, recipe=evil),
    ]
    runs[0].environment["gpu"] = evil
    write_report(runs, tmp_path)
    page = Checker((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.tags["script"] == 0
    assert page.text.count(evil) > 5
    ElementTree.parse(tmp_path / "curves-rounds.svg")


def test_unfinished_runs_are_marked_from_folders(tmp_path: Path) -> None:
    runs = [
        make_run("fedhen", {"simple": [0.5, 0.9]}),
        make_run("noside", {"simple": [0.5]}, planned=2),
        make_run("decouple", {"simple": []}, planned=2),
    ]
    folders = [write_folder(run, tmp_path / run.method) for run in runs]
    report = write_report([read_run(folder) for folder in folders], tmp_path / "report")
    page = Checker((tmp_path / "report" / "report.html").read_text(encoding="utf-8"))
    for text in (report.text, page.text, (tmp_path / "report" / "tables.md").read_text(encoding="utf-8")):
        assert "Unfinished: noside, seed 0 (noside), 1 of 2 rounds recorded" in text
        assert "No evaluated round yet: decouple, seed 0 (decouple), 0 of 2 rounds recorded" in text
    assert "not evaluated" in page.text


def test_a_report_before_any_evaluation_does_not_fail(tmp_path: Path) -> None:
    report = write_report([make_run("fedhen", {"simple": []}, planned=2)], tmp_path)
    assert "No evaluated round yet" in report.text


def test_a_report_on_the_servers_model_says_so(tmp_path: Path) -> None:
    report = write_report(three_methods(), tmp_path, owner="server", targets={"simple": [50], "complex": [60]})
    assert "Rounds to target (server model)" in report.text
    assert "50.0 %" in report.text


def test_one_method_alone_has_no_gain() -> None:
    comparison = compare(three_methods()[:1])
    tables = make_tables(comparison, choose_targets(comparison), "devices")
    assert all("Gain" not in to_markdown(table) for table in tables)


def test_an_out_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        write_report(three_methods(), tmp_path / "file")


@pytest.mark.process
def test_reports_need_no_torch_and_the_tables_no_matplotlib() -> None:
    blocked = "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None; import fedhen.reports"
    subprocess.run([sys.executable, "-c", blocked], check=True)


def test_a_method_without_a_tier_is_compared_where_it_can_be(tmp_path: Path) -> None:
    """FedAvg's devices all have the complex model: its simple cells are dashes, not missing evaluations."""
    both = {"simple": [0.5, 0.9], "complex": [0.4, 0.9]}
    fedavg = make_run("fedavg", {"complex": [0.9, 0.95]})
    runs = [make_run("fedhen", both), make_run("noside", both), fedavg]
    report = write_report(runs, tmp_path, targets={"simple": [80.0], "complex": [80.0]})
    rows = [line.split() for line in report.text.splitlines() if "80.0 %" in line][:2]
    assert rows == [["80.0", "%", "2", "2", "–", "1.0×"], ["80.0", "%", "2", "2", "1", "0.5×"]]
    assert "not evaluated" not in (tmp_path / "report.html").read_text() + (tmp_path / "curves-rounds.svg").read_text()
