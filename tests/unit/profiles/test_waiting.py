"""When a round ends, and whose answers arrive before: worked out by hand."""

from __future__ import annotations

import math

import pytest

from fedhen.profiles.waiting import Ending, Waiting

SECONDS = {0: 5.0, 1: 2.0, 2: 9.0, 3: 4.0}


@pytest.mark.parametrize(
    ("waiting", "gone", "expected"),
    [
        (Waiting(), (), Ending(9, (0, 1, 2, 3), 2)),
        # The server sees that a device has gone.
        (Waiting(), (2,), Ending(5, (0, 1, 3), 0)),
        (Waiting(deadline=6), (), Ending(6, (0, 1, 3), 2)),
        # Nobody is late: the deadline does not matter.
        (Waiting(deadline=6), (2,), Ending(5, (0, 1, 3), 0)),
        (Waiting(spare=1), (), Ending(5, (0, 1, 3), 0)),
        # Two of three are enough, and the third has gone.
        (Waiting(spare=2), (1,), Ending(5, (0, 3), 0)),
        (Waiting(deadline=3, spare=2), (), Ending(3, (1,), 2)),
        # Without any answer: until the deadline, or until the slowest of them gives up.
        (Waiting(deadline=1), (), Ending(1, (), 2)),
        (Waiting(), (0, 1, 2, 3), Ending(9, (), 2)),
        (Waiting(deadline=7), (0, 1, 2, 3), Ending(7, (), 2)),
        # It waits for one answer however many devices are spare.
        (Waiting(spare=9), (), Ending(2, (1,), 1)),
    ],
)
def test_a_round_of_four_by_hand(waiting: Waiting, gone: tuple[int, ...], expected: Ending) -> None:
    assert waiting.end(SECONDS, gone) == expected


def test_nobody_is_asked() -> None:
    assert Waiting(math.inf).end({}) == Ending(0.0, (), None)


def test_among_equals_the_first_device_is_waited_for() -> None:
    assert Waiting().end({3: 2.0, 1: 2.0}).waited_for == 1
    assert Waiting(spare=1).end({3: 2.0, 1: 2.0}) == Ending(2.0, (1,), 1)
