"""Reports on other primary metrics than accuracy. Every expected number is derived next to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedhen.errors import FedhenError
from fedhen.reports import auto_targets, compare, rounds_to_target, write_report
from fedhen.reports.charts import Chart
from fedhen.reports.comparison import list_warnings
from fedhen.reports.costs import BYTES, ROUNDS, Measure
from fedhen.reports.outcome import make_outcome_table
from fedhen.reports.tables import make_cost_table
from fedhen.reports.targets import RequestedTargets, choose_targets
from fedhen.runs.reader import Run, read_run
from fedhen.runs.records import ACCURACY, MetricInfo, Values
from support.pages import Checker
from support.report_fixtures import Curves, make_run, write_folder

PERPLEXITY = MetricInfo("perplexity", "", "lower")
RMSE = MetricInfo("rmse", "", "lower")
R2 = MetricInfo("r2")
ERROR = MetricInfo("error", "%", "lower")
DISTANCE = MetricInfo("distance", "m", "lower")
MICRO_F1 = MetricInfo("micro_f1", "%")
TOKENS = MetricInfo("token_accuracy", "%")


def language_models() -> list[Run]:
    """Two runs of four rounds: 2 MB a round, other values for the server's models than for the average."""
    curves = {
        "fedhen": ([9.0, 6.1, 5.52, 5.6], [8.0, 5.9, 5.7, 5.65]),
        "noside": ([9.5, 7.0, 6.39, 5.76], [9.0, 8.0, 7.0, 6.01]),
    }
    runs = []
    for method, (devices, server) in curves.items():
        run = make_run(method, {"simple": devices}, metric=PERPLEXITY)
        for record, value in zip(run.rounds, server, strict=True):
            record.metrics["perplexity"]["server"]["simple"] = value
        runs.append(run)
    return runs


def rows(
    runs: Sequence[Run], targets: RequestedTargets = None, owner: str = "devices", measure: Measure = ROUNDS
) -> list[tuple[str, ...]]:
    comparison = compare(runs)
    table = make_cost_table(comparison, choose_targets(comparison, targets, owner), owner, measure)
    return [row for group in table.groups for row in group.rows]


def outcome(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for group in make_outcome_table(compare(runs)).groups for row in group.rows}


def test_a_run_with_a_lower_metric_reaches_a_target_from_above() -> None:
    run = make_run("fedhen", {"simple": [9.0, 5.8, 6.5, 5.1]}, metric=PERPLEXITY)
    assert rounds_to_target(run, "simple", 9.5) == 1
    assert rounds_to_target(run, "simple", 5.8) == 2  # exactly the target, even if the next round is worse
    assert rounds_to_target(run, "simple", 5.79) == 4
    assert rounds_to_target(run, "simple", 5.0) is None


@pytest.mark.parametrize(
    ("metric", "bests", "expected"),
    [
        (PERPLEXITY, (5.52, 5.76), (5.8, 6.4)),  # 5.76 up; 5.8 + 0.58 = 6.38 up
        (PERPLEXITY, (1234.0,), (1300.0, 1500.0)),  # 1300 + 130 = 1430 up
        (RMSE, (0.58,), (0.58, 0.64)),  # 0.58 has two digits; 0.638 up
        (RMSE, (0.0312, 0.02), (0.032, 0.036)),  # 0.0352 up
        (RMSE, (9.96,), (10.0, 11.0)),
        (RMSE, (0.0,), (0.0,)),  # there is nothing 10 % above zero
        (R2, (0.9, 0.876), (0.87, 0.78)),  # 0.876 down; 0.87 - 0.087 = 0.783 down
        (R2, (0.29,), (0.29, 0.26)),  # in binary 0.29 / 0.01 is below 29; 0.261 down
        (R2, (0.5, -0.0341), (-0.035, -0.039)),  # further from zero is easier: -0.035 - 0.0035 = -0.0385
        (ERROR, (0.05, 0.1234), (12.4, 13.4)),  # 12.34 % up to one decimal, and 1.0 above
        (ERROR, (0.997,), (99.7,)),  # 100.7 % is no share
        (MICRO_F1, (0.9, 0.8469), (84.6, 83.6)),  # as for accuracy
    ],
)
def test_auto_targets_are_the_worst_runs_best_and_an_easier_one(
    metric: MetricInfo, bests: Sequence[float], expected: tuple[float, ...]
) -> None:
    worse = 2.0 if metric.direction == "lower" else -2.0
    runs = [
        make_run("fedhen", {"simple": [best + worse, best] if metric.unit != "%" else [best]}, metric=metric, seed=seed)
        for seed, best in enumerate(bests)
    ]
    assert auto_targets(runs, "simple") == expected
    for run in runs:
        assert all(rounds_to_target(run, "simple", each) is not None for each in expected)


def test_targets_of_perplexity_by_hand() -> None:
    runs = language_models()
    # devices: bests 5.52 and 5.76, so 5.8 (rounds 3 and 4) and 6.4 (rounds 2 and 3)
    assert rows(runs) == [("5.8", "3", "4", "1.3×"), ("6.4", "2", "3", "1.5×")]
    assert rows(runs, measure=BYTES) == [("5.8", "6.00 MB", "8.00 MB", "1.3×"), ("6.4", "4.00 MB", "6.00 MB", "1.5×")]
    # server: bests 5.65 and 6.01, so 6.1 and, from 6.71, 6.8
    assert rows(runs, owner="server") == [("6.1", "2", "4", "2.0×"), ("6.8", "2", "4", "2.0×")]


def test_targets_that_were_asked_for_are_in_the_metrics_unit_and_hardest_first() -> None:
    runs = language_models()
    asked = {"simple": [700.0, 5.55, 6.0]}
    assert rows(runs, asked) == [
        ("5.55", "3", "not reached", "> 1.3×"),
        ("6", "3", "4", "1.3×"),
        ("700", "1", "1", "1.0×"),
    ]
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(FedhenError, match="for simple: a target is a finite number"):
            rows(runs, {"simple": [wrong]})
    shares = [make_run("fedhen", {"simple": [0.5, 0.8469]}, metric=MICRO_F1)]
    assert rows(shares, {"simple": [50, 84.6]}) == [("84.6 %", "2"), ("50.0 %", "1")]
    with pytest.raises(FedhenError, match="target 700 for simple: a target is a percentage above 0 and at most 100"):
        rows(shares, {"simple": [700]})
    metres = [make_run("fedhen", {"simple": [200.0, 120.0]}, metric=DISTANCE)]
    assert rows(metres, {"simple": [120.0]}) == [("120 m", "2")]
    below_zero = [make_run("fedhen", {"simple": [-1.5, -0.2]}, metric=R2)]
    assert rows(below_zero, {"simple": [-1.5, -0.5]}) == [("-0.5", "2"), ("-1.5", "1")]


@pytest.mark.slow
def test_targets_of_the_configuration_are_read_from_the_folder(tmp_path: Path) -> None:
    run = make_run("fedhen", {"simple": [9.0, 6.0, 5.0]}, metric=PERPLEXITY, targets={"simple": [6.0]})
    report = write_report([read_run(write_folder(run, tmp_path / "run"))], tmp_path / "report")
    lines = [line.split() for line in report.text.splitlines()]
    assert ["Perplexity", "fedhen"] in lines and ["6", "2"] in lines


def test_a_recipes_targets_are_those_of_its_own_metric() -> None:
    """The digits' are accuracies: with another primary metric the auto rule takes their place, not the user's own."""
    recipe: dict[str, Any] = {"recipe": "digits", "targets": {"simple": [90.0, 88.0]}}

    def chosen(metric: MetricInfo, **config: Any) -> tuple[float, ...]:
        run = make_run("fedhen", {"simple": [0.5, 0.8469]}, metric=metric, **{**recipe, **config})
        return choose_targets(compare([run]))["simple"].values

    assert chosen(ACCURACY) == (90, 88)
    assert chosen(MICRO_F1) == (84.6, 83.6), "down to one decimal, and one point below"
    assert chosen(MICRO_F1, targets={"simple": [50.0]}) == (50,)
    assert chosen(MICRO_F1, recipe="mine") == (90, 88)


def test_tables_name_the_metric_and_its_direction() -> None:
    comparison = compare(language_models())
    table = make_cost_table(comparison, choose_targets(comparison), "devices", ROUNDS)
    assert table.title == "Rounds to target (all-devices average)"
    assert table.columns == ("Perplexity", "fedhen", "noside", "Gain")
    assert "first scored the perplexity on the left, or less, on the test set" in table.meaning
    rule = "the best perplexity of the worst run, rounded up to two digits, and 10 % above it"
    assert table.notes == (f"Targets for simple by rule: {rule}.",)
    ended = make_outcome_table(comparison)
    assert ended.title == "Perplexity, size and effort"
    assert ended.meaning.startswith(
        "Perplexity on the test set after the last evaluated round (final) and at its lowest"
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    {
        **{"rmse": "RMSE", "mae": "MAE", "mse": "MSE", "r2": "R²", "mean_iou": "Mean IoU", "macro_f1": "Macro F1"},
        **{"perplexity": "Perplexity", "top5": "Top-5 accuracy", "pixel_accuracy": "Pixel accuracy", "ownR2": "OwnR2"},
    }.items(),
)
def test_names_of_metrics_are_written_as_people_write_them(name: str, shown: str) -> None:
    runs = [make_run("fedhen", {"simple": [0.5, 0.8]}, metric=MetricInfo(name))]
    comparison = compare(runs)
    table = make_cost_table(comparison, choose_targets(comparison), "devices", ROUNDS)
    assert table.columns[0] == shown
    assert make_outcome_table(comparison).title == f"{shown}, size and effort"


def test_final_and_best_values_by_hand() -> None:
    runs = language_models()
    cells = outcome(runs)
    assert list(cells)[:4] == ["all devices, final", "all devices, best", "server, final", "server, best"]
    assert cells["all devices, final"] == ("5.600", "5.760")
    assert cells["all devices, best"] == ("5.520", "5.760")
    assert cells["server, best"] == ("5.650", "6.010")
    far = [make_run("fedhen", {"simple": [value]}, metric=DISTANCE, seed=s) for s, value in enumerate((120.0, 130.0))]
    assert outcome(far)["all devices, final, m"] == ("125.0 ± 7.1",)  # deviation: √(2 · 5²) = 7.07
    sizes = {0.01234: "0.01234", 12345.6: "12346", 1.5e9: "1.500e+09", 2e-7: "2.000e-07", 0.0: "0.000"}
    for value, shown in sizes.items():
        (cell,) = outcome([make_run("fedhen", {"simple": [value]}, metric=RMSE)])["all devices, final"]
        assert cell == shown


def test_further_metrics_are_rows_of_the_outcome() -> None:
    first, second = language_models()
    assert first.summary is not None
    first = replace(first, summary=replace(first.summary, metrics=[PERPLEXITY, TOKENS]))
    for number, record in enumerate(first.rounds, start=1):
        values: Values = {"devices": {"simple": number / 10}, "server": {"simple": number / 8}}
        record.metrics["token_accuracy"] = values
    cells = outcome([first, second])
    assert cells["all devices, token accuracy, final, %"] == ("40.00", "–")
    assert cells["server, token accuracy, final, %"] == ("50.00", "–")
    assert "all devices, token accuracy, best, %" not in cells
    assert "Further metrics are those of the last evaluated round." in make_outcome_table(compare([first])).meaning


def test_values_that_are_not_finite_are_said_and_never_best() -> None:
    def diverged(values: Sequence[float | None], seed: int = 0) -> Run:
        curves: Curves = {"simple": [1.0] * len(values)}
        run = make_run("noside", curves, metric=PERPLEXITY, seed=seed)
        for record, value in zip(run.rounds, values, strict=True):
            record.metrics["perplexity"]["devices"]["simple"] = value
        return run

    good = make_run("fedhen", {"simple": [9.0, 8.0, 7.0]}, metric=PERPLEXITY)
    cells = outcome([good, diverged([9.5, None, None])])
    assert cells["all devices, final"] == ("7.000", "not finite")
    assert cells["all devices, best"] == ("7.000", "9.500")
    # It trained for 3 rounds in vain, not for 1: 3 / 2.
    assert rows([good, diverged([9.5, None, None])], {"simple": [8.0]}) == [("8", "2", "not reached", "> 1.5×")]
    never = diverged([None, None, None])
    assert outcome([never])["all devices, best"] == ("not finite",)
    assert rows([good, never], {"simple": [8.0]}) == [("8", "2", "not reached", "> 1.5×")]
    assert outcome([diverged([9.5, None]), diverged([9.0, 8.0], seed=1)])["all devices, final"] == (
        "1 of 2 not finite",
    )
    assert list_warnings(compare([good, never])) == []
    alone = compare([never])
    (panel,) = Chart(alone, choose_targets(alone), "devices", ROUNDS).figure(["simple"]).axes
    assert [text.get_text() for text in panel.texts] == ["no finite value"]


def test_runs_with_different_metrics_are_refused_in_one_line(tmp_path: Path) -> None:
    runs = [make_run("fedhen", {"simple": [5.0]}, metric=PERPLEXITY), make_run("noside", {"simple": [0.5]})]
    with pytest.raises(FedhenError) as refusal:
        write_report(runs, tmp_path / "report")
    assert str(refusal.value) == (
        "runs with different metrics need a report each: runs/fedhen-0 has perplexity (lower is better), "
        "runs/noside-0 has accuracy (%, higher is better)"
    )
    assert not (tmp_path / "report").exists()
    up, down = (make_run(d, {"simple": [5.0]}, metric=MetricInfo("own", direction=d)) for d in ("higher", "lower"))
    with pytest.raises(FedhenError, match=r"has own \(higher is better\), runs/lower-0 has own \(lower is better\)"):
        compare([up, down])


@pytest.mark.parametrize("metric", [ACCURACY, PERPLEXITY])
def test_a_report_without_test_data_has_one_line_on_it_and_the_costs(tmp_path: Path, metric: MetricInfo) -> None:
    blind = make_run("fedhen", {"simple": [None, None], "complex": [None, None]}, metric=metric)
    report = write_report([read_run(write_folder(blind, tmp_path / "blind"))], tmp_path / "report")
    said = "No scores, since there is no test data: fedhen, seed 0 (blind), 2 of 2 rounds recorded."
    assert report.text.splitlines()[0] == said and report.text.count("test data") == 1
    lines = [line.split() for line in report.text.splitlines()]
    # two tiers, 1 MB each down and up, two rounds
    assert ["bytes", "sent", "8.00", "MB"] in lines and ["rounds", "2"] in lines
    assert "to target" not in report.text and metric.name not in report.text.lower()
    page = Checker((tmp_path / "report" / "report.html").read_text(encoding="utf-8"))
    assert page.tags["table"] == 1 and page.tags["svg"] == 0 and said in page.text
    assert [path.suffix for path in report.paths] == [".html", ".md", ".tex"]


@pytest.mark.slow
def test_a_run_without_test_data_is_compared_where_it_can_be(tmp_path: Path) -> None:
    seeing, _ = language_models()
    report = write_report([seeing, make_run("noside", {"simple": [None] * 4}, metric=PERPLEXITY)], tmp_path)
    assert "No scores, since there is no test data: noside" in report.text
    # auto targets of fedhen alone: 5.52 up, and 5.6 + 0.56 = 6.16 up
    lines = [" ".join(line.split()) for line in report.text.splitlines()]
    assert "5.6 3 not evaluated –" in lines and "6.2 2 not evaluated –" in lines


@pytest.mark.slow
def test_an_unfinished_run_knows_its_metric_from_its_environment(tmp_path: Path) -> None:
    run = make_run("fedhen", {"simple": [9.0, 6.0]}, metric=PERPLEXITY, planned=5)
    found = read_run(write_folder(run, tmp_path / "run"))
    assert found.summary is None and found.metric == PERPLEXITY
    report = write_report([found], tmp_path / "report")
    assert "Unfinished: fedhen, seed 0 (run), 2 of 5 rounds recorded" in report.text
    page = Checker((tmp_path / "report" / "report.html").read_text(encoding="utf-8"))
    assert "direction" not in page.text  # the metric is neither hardware nor a version


def test_charts_say_which_way_is_better_and_fit_their_values() -> None:
    comparison = compare(language_models())
    chart = Chart(comparison, choose_targets(comparison), "devices", ROUNDS)
    assert chart.title == "Perplexity over rounds"
    assert chart.caption == "Test perplexity of the all-devices average. Lower is better. Dotted: targets."
    (panel,) = chart.figure(["simple"]).axes
    assert panel.get_ylabel() == "test perplexity (all-devices average)\nlower is better"
    bottom, top = panel.get_ylim()
    assert 5 < bottom < 5.52 and 9.5 < top < 10  # a plain axis that ends where the values end
    assert np.asarray(panel.lines[0].get_ydata()).tolist() == [9.0, 6.1, 5.52, 5.6]
    # The label of the lower target hangs below its line only where both would overlap.
    assert [text.get_text() for text in panel.texts] == ["6.4", "5.8"]
    shares = compare([make_run("fedhen", {"simple": [0.5, 0.8]}, metric=MICRO_F1)])
    (panel,) = Chart(shares, choose_targets(shares), "server", ROUNDS).figure(["simple"]).axes
    assert panel.get_ylabel() == "test micro F1, % (server model)"
    assert np.asarray(panel.lines[0].get_ydata()).tolist() == [50.0, 80.0]
