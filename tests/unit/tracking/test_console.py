"""The lines that show the progress of a run."""

from __future__ import annotations

from typing import Any

import pytest

from fedhen.runs.records import ACCURACY, MetricInfo
from fedhen.tracking.console import Bars, Lines, Pace

RMSE = MetricInfo("rmse", "", "lower")
TIMING = {"total": 2.0}


def record(number: int, **scores: Any) -> dict[str, Any]:
    return {"round": number, "active": [0], "dropped": [], **scores}


def both(simple: float | None, complex_: float | None = None) -> dict[str, dict[str, float | None]]:
    """Scores in which the server's, which are not shown, are 9."""
    return {"server": {"simple": 9.0, "complex": 9.0}, "devices": {"simple": simple, "complex": complex_}}


def test_lines_of_a_regression(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines({"fedhen": 2}, RMSE)
    lines.show("fedhen", record(1, metrics={"rmse": both(5.52, None), "mae": both(4.0, 3.0)}), TIMING)
    lines.show("fedhen", record(2, metrics={"rmse": both(0.123456, 1234.56)}), TIMING)
    assert capsys.readouterr().err.splitlines() == [
        "fedhen  round 1/2  simple 5.52  complex not finite  2.00 s a round  2 s left",
        "fedhen  round 2/2  simple 0.1235  complex 1235  2.00 s a round  took 4 s",
    ]


def test_lines_of_a_classification(capsys: pytest.CaptureFixture[str]) -> None:
    Lines({"fedhen": 1}).show("fedhen", record(1, accuracy=both(0.8444, 0.5), metrics={"loss": both(1.0)}), TIMING)
    assert capsys.readouterr().err == "fedhen  round 1/1  simple 84.4 %  complex 50.0 %  2.00 s a round  took 2 s\n"


def test_lines_without_scores(capsys: pytest.CaptureFixture[str]) -> None:
    Lines({"fedhen": 1}).show("fedhen", record(1), TIMING)
    assert capsys.readouterr().err == "fedhen  round 1/1  2.00 s a round  took 2 s\n"


def test_bars_of_a_regression() -> None:
    bars = Bars({f"seed {seed}": 2 for seed in range(4)}, RMSE)
    bars.show("seed 1", record(1, metrics={"rmse": both(5.52, 4.0)}), TIMING)
    shown = {task.description: task.fields["scores"] for task in bars.progress.tasks}
    assert shown["seed 0"] == "waiting" and shown["seed 1"] == "simple 5.52  complex 4" and shown["all"] == ""


def test_the_last_scores_stay_until_there_are_others() -> None:
    pace = Pace(3, MetricInfo("micro_f1", "%"))
    pace.add(record(1, metrics={"micro_f1": both(0.25, 0.5)}), TIMING)
    pace.add(record(2), TIMING)
    assert pace.scores == "simple 25.0 %  complex 50.0 %"
    # The primary metric is shown, also if accuracy is a further one.
    pace.add(record(3, accuracy=both(0.9, 0.9), metrics={"micro_f1": both(0.375, 0.5)}), TIMING)
    assert pace.scores == "simple 37.5 %  complex 50.0 %"


def test_a_metric_that_was_not_announced_is_shown_without_unit() -> None:
    pace = Pace(1, ACCURACY)
    pace.add(record(1, metrics={"rmse": both(0.5, 0.25)}), TIMING)
    assert pace.scores == "simple 0.5  complex 0.25"
    pace = Pace(1, RMSE)
    pace.add(record(1, accuracy=both(0.5, 0.25)), TIMING)
    assert pace.scores == "simple 50.0 %  complex 25.0 %"


def test_no_runs_are_shown_without_complaint() -> None:
    """As for a command that finds all its runs finished."""
    with Lines({}), Bars({}):
        pass


def test_percents_are_rounded_as_before_there_were_other_metrics() -> None:
    """The shares of 10000 test images: a value may be halfway between two tenths of a percent."""
    assert all(ACCURACY.format(n / 10000) == f"{100 * (n / 10000):.1f} %" for n in range(10001))
