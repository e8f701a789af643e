"""Runs whose server has no whole model: their scores are called those of the devices' own models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedhen.reports.comparison import compare
from fedhen.reports.costs import ROUNDS
from fedhen.reports.outcome import make_outcome_table
from fedhen.reports.tables import make_cost_table
from fedhen.reports.targets import choose_targets
from fedhen.runs.reader import Run
from support.report_fixtures import make_run


def run(method: str, own: bool) -> Run:
    personal, evaluation = {"name": "fedper" if own else "none"}, {"every": 1, "devices": False}
    made = make_run(method, {"simple": [0.5, 0.6]}, evaluation=evaluation, personal=personal)
    return replace(made, rounds=[replace(each, scored="own models" if own else "") for each in made.rounds])


@pytest.mark.parametrize(
    ("runs", "whose", "row", "note"),
    [
        ([run("fedhen", False)], "server model", "server, final, %", ""),
        ([run("fedhen", True)], "devices’ own models", "devices’ own, final, %", ""),
        (
            [run("noside", False), run("fedhen", True)],
            "server model; of fedhen+fedper devices’ own models",
            "server, final, %",
            "Of fedhen+fedper, “server” is the mean of the devices’ own models.",
        ),
    ],
    ids=["none", "all", "some"],
)
def test_scores_are_named_after_whose_they_are(runs: list[Run], whose: str, row: str, note: str) -> None:
    comparison = compare(runs)
    table = make_cost_table(comparison, choose_targets(comparison), "server", ROUNDS)
    assert table.title == f"Rounds to target ({whose})"
    outcome = make_outcome_table(comparison)
    assert row in [cells[0] for cells in outcome.groups[0].rows]
    assert list(outcome.notes) == ([note] if note else [])
