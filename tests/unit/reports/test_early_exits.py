"""What `fedhen evaluate --exits` found is in the report of the run: every number comes from the file by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedhen.reports.comparison import compare
from fedhen.reports.early_exits import EarlyExits
from fedhen.reports.report import write_report
from fedhen.runs.layout import EXITS
from fedhen.runs.reader import read_run
from support.report_fixtures import make_run, write_folder

STUDY: dict[str, Any] = {
    "examples": 200,
    "score": {"simple": 0.9, "complex": 0.8},
    "operations": {"simple": 30, "complex": 100},
    "overthinking": 0.125,
    "chosen": 0.7,
    "held_out": {"threshold": 0.7, "early": 0.5, "score": 0.95, "operations": 0.65},
    "last_on_held_out": 0.85,
    "table": [
        {"threshold": 0.0, "early": 1.0, "score": 0.9, "operations": 0.3},
        {"threshold": 0.9, "early": 0.5, "score": 0.92, "operations": 0.65},
        {"threshold": 2.0, "early": 0.0, "score": 0.8, "operations": 1.0},
    ],
}


def write(folder: Path, number: int, study: dict[str, Any] = STUDY, method: str = "fedhen") -> Path:
    """Writes a run of two rounds with a study of the exits of a round."""
    write_folder(make_run(method, {"simple": [0.5, 0.9], "complex": [0.5, 0.8]}), folder)
    (folder / EXITS).write_text(json.dumps({"round": number, "study": study}))
    return folder


def test_the_report_has_the_scores_of_the_exits_and_a_curve_over_operations(tmp_path: Path) -> None:
    runs = [read_run(write(tmp_path / "a", 2)), read_run(write(tmp_path / "b", 1, method="noside"))]
    report = write_report(runs, tmp_path / "out")
    rows = {line.strip().split("  ")[0]: line.split()[-2:] for line in report.text.split("Early exits")[1].splitlines()}
    # The other run's study is of an earlier round than its last.
    assert rows["simple exit, %"] == ["90.00", "–"] and rows["complex exit, %"] == ["80.00", "–"]
    assert rows["right at the first exit and wrong at the last, %"] == ["12.5", "–"]
    assert rows["threshold"] == ["0.7", "–"]
    assert rows["on the other half, %"] == ["95.00", "–"] and rows["last exit, on the other half, %"] == ["85.00", "–"]
    assert rows["operations there, %"] == ["65.0", "–"]
    (plot,) = EarlyExits(compare(runs)).plots
    line = plot.curves[0].line
    assert line.spent == pytest.approx([30, 65, 100]) and line.mean == pytest.approx([90, 92, 80])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Accuracy over operations" in page and '<th scope="row">never</th>' in page
    assert (tmp_path / "out" / "exits.svg").is_file()


def test_seeds_are_averaged_by_threshold(tmp_path: Path) -> None:
    other = {**STUDY, "table": [{**row, "score": row["score"] - 0.1} for row in STUDY["table"]], "chosen": 0.9}
    runs = []
    for seed, study in enumerate((STUDY, other)):
        folder = tmp_path / str(seed)
        write_folder(make_run("fedhen", {"simple": [0.9], "complex": [0.8]}, seed=seed), folder)
        (folder / EXITS).write_text(json.dumps({"round": 1, "study": study}))
        runs.append(read_run(folder))
    exits = EarlyExits(compare(runs))
    line = exits.plots[0].curves[0].line
    assert line.mean == pytest.approx([85, 87, 75]) and line.low == pytest.approx([80, 82, 70])
    assert ("threshold", "0.7, 0.9") in exits.table().groups[1].rows


@pytest.mark.parametrize("content", ["", "{", "[]", '{"round": 1}', '{"round": 1, "study": {"table": []}}', "[" * 9999])
def test_a_damaged_study_is_left_out(content: str, tmp_path: Path) -> None:
    folder = write_folder(make_run("fedhen", {"simple": [0.9]}), tmp_path / "run")
    (folder / EXITS).write_text(content)
    assert not EarlyExits(compare([read_run(folder)]))
