"""Randomness has an address."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhen import seeds

addresses = st.tuples(
    st.integers(0, 5), st.sampled_from(["order", "augmentation"]), st.integers(1, 50), st.integers(0, 99)
)


@given(addresses, addresses)
def test_streams_are_equal_exactly_when_addresses_are(
    a: tuple[int, str, int, int], b: tuple[int, str, int, int]
) -> None:
    same = seeds.stream(*a).random(4).tolist() == seeds.stream(*b).random(4).tolist()
    assert same == (a == b)


def test_parts_of_an_address_do_not_run_into_each_other() -> None:
    assert seeds.number(1, "a", 23) != seeds.number(1, "a2", 3)
    assert seeds.number(1, "a", 1, 23) != seeds.number(1, "a", 12, 3)
    assert seeds.number(1, "2") != seeds.number(1, 2)


def test_draws_of_torch_are_addressed_and_do_not_change_the_global_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeds.randomness(0, "model", 1, 2):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeds.randomness(0, "model", 1, 2):
        assert torch.equal(torch.rand(3), first)
