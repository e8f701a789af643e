"""The ledger: what a checkpoint must say about past noise, and releases that no checkpoint has."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fedhen.errors import CheckpointError, ConfigError
from fedhen.privacy.accounting import gaussian_epsilon
from fedhen.privacy.ledger import Ledger
from fedhen.privacy.noise import FRESH_NOISE, make_seeded_source
from fedhen.runs.private import read_participation, read_secret, read_spent, write_secret, write_spent
from support.private_rounds import make_central, nested, play

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


def test_releases_that_no_checkpoint_has_are_counted_and_their_noise_begins_anew() -> None:
    """With b = 2, 4 rounds were released and the checkpoint has 3: 2 + 1 participations after one more, so μ = √3/z."""
    server = nested({"a": [4]}, {})
    mechanism = make_central(server, {"simple": 4, "complex": 4}, noise=2.0, separation=2, source=FRESH_NOISE)
    for _ in range(3):
        play(mechanism, server, [])
    saved = mechanism.ledger
    play(mechanism, server, [])
    spent = mechanism.spent
    assert spent == (4,)
    mechanism.restore(saved)
    mechanism.recall(spent)
    play(mechanism, server, [])
    assert mechanism.ledger.streams == (4, 1)
    assert mechanism.epsilon == gaussian_epsilon(math.sqrt(2 + 1) / 2.0, 1e-3)
    assert len(mechanism.ledger.past) == 1
    before = mechanism.ledger
    mechanism.recall([4, 1])
    assert mechanism.ledger is before, "the checkpoint has all of it, so its noise goes on"


def test_noise_from_the_seed_is_the_same_release_if_a_round_is_played_again() -> None:
    server = nested({"a": [4]}, {})
    seeded, fresh = (
        make_central(server, {"simple": 4, "complex": 4}, source=source)
        for source in (make_seeded_source(0), FRESH_NOISE)
    )
    found = []
    for mechanism in (seeded, fresh):
        start = mechanism.ledger
        once = play(mechanism, server, [])["simple"]["a"]
        mechanism.restore(start)
        found.append(torch.equal(once, play(mechanism, server, [])["simple"]["a"]))
    assert found == [True, False]
    assert seeded.spent == ()


def test_the_file_of_what_was_spent(tmp_path: Path) -> None:
    assert read_spent(tmp_path) == []
    write_spent(tmp_path, (4, 1))
    assert read_spent(tmp_path) == [4, 1]
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700
    for text in ("{", "{}", '{"streams": [-1]}', '{"streams": 3}', "[]"):
        (tmp_path / "private" / "ledger.json").write_text(text)
        with pytest.raises(CheckpointError, match="nobody knows what the run has spent"):
            read_spent(tmp_path)


def test_the_file_of_the_secret(tmp_path: Path) -> None:
    assert read_secret(tmp_path) == b""
    write_secret(tmp_path, bytes(range(32)))
    path = tmp_path / "private" / "secret"
    assert read_secret(tmp_path) == bytes(range(32)) and path.stat().st_mode & 0o777 == 0o600
    for text in ("", "00" * 31, "xy" * 32, "é"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read as a secret of 64 hexadecimal digits"):
            read_secret(tmp_path)


def test_who_took_part_is_read_from_the_servers_part(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").write_text('{"round": 1, "active": []}\n')
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "rounds.jsonl").write_text('{"round": 1, "active": [3]}\n{"round": 2, "active": [4]}\n')
    assert [each["active"] for each in read_participation(tmp_path, 1)] == [[3]]
