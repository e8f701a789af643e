"""The ledger: what a checkpoint must say about past noise."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedhen.privacy.ledger import Ledger
from fedhen.runs.private import read_participation

SAVED = {"streams": [5], "bound": 0.5, "past": 2}


@pytest.mark.parametrize(
    "values",
    [
        {**SAVED, "streams": [4]},
        {**SAVED, "past": 1},
        {**SAVED, "past": 3},
        {**SAVED, "streams": [4, 1]},
        {**SAVED, "streams": [6, -1]},
        {**SAVED, "streams": []},
        {**SAVED, "bound": math.nan},
        {},
    ],
)
def test_a_ledger_that_does_not_fit_its_round(values: dict[str, object]) -> None:
    """After 5 rounds with b = 3: fewer releases than rounds, or another number of past noises, would cost privacy."""
    ledger = Ledger((0,), 0.5, shapes={"simple": {"a": (2,)}}, bands=3)
    expected = ledger.expect(SAVED, 5)
    assert expected.releases == 5 and len(expected.past) == 2
    assert expected.past[0]["simple"]["a"].shape == (2,)
    assert len(ledger.expect({**SAVED, "streams": [4, 1], "past": 1}, 5).past) == 1
    with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
        ledger.expect(values, 5)


def test_who_took_part_is_read_from_the_servers_part(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").write_text('{"round": 1, "active": []}\n')
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "rounds.jsonl").write_text('{"round": 1, "active": [3]}\n{"round": 2, "active": [4]}\n')
    assert [each["active"] for each in read_participation(tmp_path, 1)] == [[3]]
