"""Which runs are compared, how variants are named, and what is warned of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from fedhen.errors import FedhenError
from fedhen.reports import compare, write_report
from fedhen.reports.comparison import list_warnings
from fedhen.reports.costs import BYTES, ROUNDS
from fedhen.reports.curves import average_curves, choose_looks
from fedhen.reports.tables import make_cost_table
from fedhen.reports.targets import choose_targets
from fedhen.runs.reader import Run
from support.report_fixtures import make_run, staircase


def test_the_highlighted_method_comes_first_and_can_be_any() -> None:
    runs = [make_run(method, {"simple": [0.5]}) for method in ("noside", "mine", "fedhen")]
    assert compare(runs).methods == ("fedhen", "noside", "mine")
    assert compare(runs, hero="mine").methods == ("mine", "noside", "fedhen")
    assert compare(runs[:2]).methods == ("noside", "mine")


def test_what_cannot_be_compared_is_refused_in_one_line() -> None:
    run = make_run("fedhen", {"simple": [0.5]})
    twin = replace(run, folder=Path("runs/again"))
    with pytest.raises(FedhenError, match="two runs of fedhen with seed 0: runs/fedhen-0 and runs/again"):
        compare([run, twin])
    with pytest.raises(FedhenError, match=r"different recipes.*runs/fedhen-0 is made-up, runs/noside-0 is another"):
        compare([run, make_run("noside", {"simple": [0.5]}, recipe="another")])
    with pytest.raises(FedhenError, match="different tiers"):
        compare([run, make_run("noside", {"small": [0.5]})])
    with pytest.raises(FedhenError, match="at least one run"):
        compare([])
    with pytest.raises(FedhenError, match="unknown owner 'device'"):
        write_report([run], Path("unused"), owner="device")


def test_runs_on_other_data_or_of_another_task_are_refused_if_they_say_so() -> None:
    def about(method: str, **subject: str) -> Run:
        run = make_run(method, {"simple": [0.5]}, data={"name": f"{method}.npz"})
        return replace(run, environment={**run.environment, **subject})

    one, two = "0123456789" + "0" * 54, "abcdef0123" + "0" * 54
    old, first = about("decouple"), about("fedhen", task="classification", data_digest=one)
    fleet = about("fedavg", task="classification")
    same = about("noside", task="classification", data_digest=one)
    assert compare([old, first, same, fleet]).methods == ("fedhen", "decouple", "noside", "fedavg")
    with pytest.raises(FedhenError) as refusal:
        compare([old, first, fleet, about("noside", task="classification", data_digest=two)])
    assert str(refusal.value) == (
        "runs on different data need a report each: runs/fedhen-0 has fedhen.npz (01234567), "
        "runs/noside-0 has noside.npz (abcdef01)"
    )
    with pytest.raises(FedhenError) as refusal:
        compare([old, first, about("noside", task="multi-label", data_digest=two)])
    assert str(refusal.value) == (
        "runs of different tasks need a report each: runs/fedhen-0 is classification, runs/noside-0 is multi-label"
    )


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
        "noside (training.lr=0.2)": [0, 1],
    }
    table = make_cost_table(comparison, choose_targets(comparison, {"simple": [80.0]}), "devices", ROUNDS)
    # There is no gain over a method's own variants.
    assert table.columns == ("Accuracy", "noside (n = 2)", "noside (training.lr=0.2) (n = 2)")
    assert table.groups[0].rows[0][1:] == ("5.0 ± 1.4", "2.5 ± 0.7")
    told = [text for text in list_warnings(comparison) if not text.startswith("Unfinished")]
    assert told == [
        "Variants of noside, named by what they change; noside itself has training.lr = 0.1.",
        "The runs differ in more than method and seed: rounds is 10 or 20.",
    ]
    # Variants are found within each method, and differences between methods are still reported.
    with_hero = compare([*runs, variant({1: 0.8}, method="fedhen", training={"lr": 0.3, "clip": 5.0})])
    assert with_hero.methods == ("fedhen", "noside", "noside (training.lr=0.2)")
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
    with pytest.raises(FedhenError, match="two runs of mine with seed 0"):
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
