"""Oort's and FedCS's choices among five devices, worked out by hand, and devices that cannot be asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

import pytest

from fedhen.algorithm.oort import Notes, Oort, exploration, parse_notes
from fedhen.algorithm.sampling import make_sampler
from fedhen.algorithm.timetable import Timetable
from fedhen.config.devices_settings import DevicesConfig

ALL = range(5)


def timetable(seconds: list[float], there: Collection[int] = ALL, deadline: float = math.inf) -> Timetable:
    return Timetable(seconds, [10] * len(seconds), lambda number: there, deadline)


HEARD = {0: 4, 1: 9, 2: 1, 3: 9}
LOSSES = {0: 1.0, 1: 2.0, 2: 4.0, 3: 5.0}


def oort(quota: int, there: Collection[int] = ALL) -> Oort:
    times = timetable([10, 20, 30, 40, 50], there)
    return Oort({"only": ALL}, {"only": quota}, times, seed=0, notes=Notes(HEARD))


def test_oorts_scores_by_hand() -> None:
    """Utilities are 10 examples times 1, 2, 4 and 5: 0, 1/4, 3/4 and 1 of their range.

    In round 60, 0.1·ln 60 = 0.40943; the roots of it divided by 4, 9, 1 and 9 are 0.31993, 0.21329, 0.63987, 0.21329.
    30 % of five durations is the second, 20 s: devices 2 and 3 are slower, by factors that squared are 4/9 and 1/4.
    """
    found = oort(2).score(60, [0, 1, 2, 3], LOSSES)
    expected = {0: 0.31993, 1: 0.46329, 2: (0.75 + 0.63987) * 4 / 9, 3: 1.21329 / 4}
    assert found == pytest.approx(expected, abs=1e-5)


def test_oorts_choices_by_hand() -> None:
    """A fifth is for new devices from round 29 on: of two, three or four devices one, the only new one.

    Scores of the others are .320, .463, .618 and .303. One of them: 2, as no other has 95 % of .618. Two: 2 and 1.
    Three: 2, 1 and 0, but device 3 has 94.8 % of the third score, so is not drawn.
    """
    assert exploration(28) > 0.2 and exploration(29) == pytest.approx(0.9 * 0.95**29) and exploration(60) == 0.2
    assert oort(2)(60, LOSSES) == [2, 4]
    assert oort(3)(60, LOSSES) == [1, 2, 4]
    assert oort(4)(60, LOSSES) == [0, 1, 2, 4]
    assert oort(9)(60, LOSSES) == [0, 1, 2, 3, 4]


def test_oort_asks_nobody_who_is_not_there() -> None:
    """Without device 2 the utilities' range is the same, and device 1 is the best; without 4 nobody is new."""
    assert oort(2, [0, 1, 3, 4])(60, LOSSES) == [1, 4]
    assert oort(2, [0, 1, 2, 3])(60, LOSSES) == [1, 2]
    assert oort(2, [])(60, LOSSES) == []


def test_oort_begins_with_new_devices_the_fast_ones_more_often() -> None:
    """In round 1 85.5 % are for new devices: of one device the whole. Drawn by 1/d: 60, 30, 20, 15 and 12 of 137."""
    times = timetable([10, 20, 30, 40, 50])
    drawn = Counter(Oort({"only": ALL}, {"only": 1}, times, seed)(1, {})[0] for seed in range(2000))
    for device, weight in enumerate([60, 30, 20, 15, 12]):
        share = weight / 137
        assert abs(drawn[device] - 2000 * share) < 4.5 * math.sqrt(2000 * share * (1 - share))


def test_oort_ranks_within_tiers() -> None:
    """The losses of tier b are far higher, and still each tier has its quota."""
    times, notes = timetable([1.0] * 6, range(6)), Notes(dict.fromkeys(range(6), 50))
    sampler = Oort({"a": [0, 1, 2], "b": [3, 4, 5]}, {"a": 2, "b": 1}, times, 0, notes)
    assert sampler(60, {0: 0.1, 1: 2.0, 2: 1.9, 3: 100.0, 4: 900.0, 5: 300.0}) == [1, 2, 4]


def test_a_loss_that_is_not_finite_counts_nothing() -> None:
    sampler = oort(2)
    assert [sampler.utility(0, {0: loss}) for loss in (math.nan, math.inf, 3.0)] == [0, 0, 30]


def test_the_preferred_duration_rises_when_utility_stalls() -> None:
    """Every 20 rounds, if the last 20 gave within a tenth of what the 20 before gave."""

    def after(first: float, second: float) -> Notes:
        notes = Notes()
        for number in range(1, 41):
            notes = notes.after(number, {number % 5: first if number <= 20 else second})
        return notes

    assert after(10, 10.9).percentile == after(10, 9.1).percentile == 35
    assert after(10, 11.5).percentile == after(10, 8.5).percentile == 30
    assert after(10, 10).heard == {0: 40, 1: 36, 2: 37, 3: 38, 4: 39}
    stalled = after(10, 10)
    times = timetable([10, 20, 30, 40, 50])
    # 30 and 35 % of five are the second; 40 % is the third.
    for percentile, seconds in ((30, 20), (35, 20), (40, 30), (95, 50), (100, math.inf)):
        notes = Notes(stalled.heard, stalled.gains, percentile)
        assert Oort({"only": ALL}, {"only": 1}, times, 0, notes).preferred_seconds() == seconds


def test_notes_survive_being_written_and_damaged_ones_are_refused() -> None:
    notes = Notes(HEARD, [0.1, 1 / 3], 35)
    assert parse_notes(notes.describe(), devices=5, played=9) == notes
    for wrong in (
        {"heard": [[5, 1]]},
        {"heard": [[0, 10]]},
        {"heard": [[0, 0]]},
        {"gains": [math.nan]},
        {"gains": [1.0] * 41},
        {"percentile": 20},
    ):
        with pytest.raises(ValueError):
            parse_notes({**notes.describe(), **wrong}, devices=5, played=9)


FIVE = DevicesConfig(number=5, active=3, sampling="deadline", candidates=5)
TIERS = ["a", "a", "a", "b", "b"]


@pytest.mark.parametrize(("deadline", "expected"), [(30, [0, 1, 3]), (10, [0, 1, 3]), (4, [1, 3]), (2, [1]), (0.5, [])])
def test_fedcs_by_hand(deadline: float, expected: list[int]) -> None:
    """Three of five are active: two of the three of tier a, one of the two of tier b, the fastest that are in time."""
    times = timetable([5, 1, 9, 3, 20], deadline=deadline)
    assert make_sampler(FIVE, 0, TIERS, times)(1, {}) == expected


def test_fedcs_chooses_among_candidates_that_are_there() -> None:
    """Without candidates to spare, those that are drawn are asked, if they are in time."""
    times = timetable([5, 1, 9, 3, 20], there=[0, 2, 4], deadline=10)
    assert make_sampler(FIVE, 0, TIERS, times)(1, {}) == [0, 2]
    few = DevicesConfig(number=5, active=3, sampling="deadline", candidates=3)
    drawn = {
        tuple(make_sampler(few, seed, TIERS, timetable([5, 1, 9, 3, 20], deadline=10))(1, {})) for seed in range(60)
    }
    assert drawn == {(0, 1, 3), (0, 2, 3), (1, 2, 3), (0, 1), (0, 2), (1, 2)}


def test_fedcs_is_fair_among_equally_fast_devices() -> None:
    """Two of three, 400 times: each 267 times, with a deviation of √(400·2/9) = 9.4."""
    sampler = make_sampler(FIVE, 0, TIERS, timetable([1.0] * 5, deadline=10))
    asked = Counter(device for number in range(400) for device in sampler(number, {}))
    assert all(abs(asked[device] - 266.7) < 4.5 * 9.4 for device in (0, 1, 2))
    assert asked[3] + asked[4] == 400 and abs(asked[3] - 200) < 4.5 * 10


@pytest.mark.parametrize("sampling", ["uniform", "by-tier", "bernoulli", "loss"])
def test_others_stand_in_for_devices_that_are_not_there(sampling: str) -> None:
    """If all are there, the choice is that without a clock; else as many are asked as long as there are any."""
    devices = DevicesConfig(number=10, active=4, sampling=sampling)  # type: ignore[arg-type]
    tiers, seconds = ["a"] * 5 + ["b"] * 5, [1.0] * 10
    plain = make_sampler(devices, 0, tiers)
    everywhere, some, few = (
        make_sampler(devices, 0, tiers, timetable(seconds, there)) for there in (range(10), [1, 2, 3, 6, 7, 8], [4, 9])
    )
    for number in range(1, 30):
        drawn = plain(number, {})
        assert everywhere(number, {}) == drawn
        standing = some(number, {})
        assert set(standing) <= {1, 2, 3, 6, 7, 8} and set(drawn) & {1, 2, 3, 6, 7, 8} <= set(standing)
        assert len(standing) == len(set(standing)) == min(6, len(drawn))
        assert set(few(number, {})) <= {4, 9} and len(few(number, {})) == min(2, len(drawn))
