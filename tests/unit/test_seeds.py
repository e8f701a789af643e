"""Randomness has an address."""

from __future__ import annotations

import hashlib
import hmac
from itertools import combinations

import numpy as np
import pytest
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


SECRET = bytes(range(32))


def test_numbers_of_a_seed_are_as_they_always_were() -> None:
    """Runs without a secret keep their bytes: SHA-256 of the address, written as here."""
    expected = int.from_bytes(hashlib.sha256(b"int:7/str:order/int:3/int:12").digest()[:8], "little") >> 1
    assert seeds.number(7, "order", 3, 12) == expected
    streams = seeds.RunStreams(7).of_device(3, 12)
    assert streams.stream("order").random() == seeds.stream(7, "order", 3, 12).random()
    assert streams.stream("order", "copy", 1).random() == seeds.stream(7, "order", 3, 12, "copy", 1).random()
    assert seeds.RunStreams(7).initial == 7
    with pytest.raises(ValueError, match="without a secret"):
        seeds.RunStreams(7).key_of_device(1, 2)


def test_a_key_is_the_hmac_of_its_address() -> None:
    """Computed here by hand. A number under a secret is no part of a key, whatever its address."""
    expected = hmac.new(SECRET, b"str:key/str:device/int:3/int:12", hashlib.sha256).digest()
    assert seeds.RunStreams(SECRET).key_of_device(3, 12) == expected
    purpose = hmac.new(expected, b"str:number/str:order/str:copy", hashlib.sha256).digest()
    streams = seeds.RunStreams(SECRET).of_device(3, 12)
    number = int.from_bytes(purpose[:8], "little") >> 1
    assert streams.stream("order", "copy").random() == np.random.Generator(np.random.PCG64(number)).random()


def test_a_node_has_the_streams_of_its_round_and_no_others() -> None:
    run = seeds.RunStreams(SECRET)
    node = seeds.KeyStreams(run.initial_key, {3: run.key_of_device(3, 12)})
    for purpose in ("order", "augmentation", "model", "wire"):
        mine = node.of_device(3, 0).stream(purpose).random(3).tolist()
        assert mine == run.of_device(3, 12).stream(purpose).random(3).tolist()
        others = [run.of_device(number, device) for number, device in ((3, 11), (2, 12), (4, 12), (12, 3))]
        assert all(other.stream(purpose).random(3).tolist() != mine for other in others)
    assert node.initial == run.initial
    with pytest.raises(KeyError):
        node.of_device(4, 12)


def test_keys_of_two_rounds_or_devices_are_unrelated() -> None:
    """Any two differ in 128 of 256 bits, within five deviations of √(256/4) = 8; so do the secret and any key."""
    run = seeds.RunStreams(SECRET)
    keys = [SECRET, run.initial_key, *(run.key_of_device(number, device) for number in range(8) for device in range(4))]
    for one, other in combinations(keys, 2):
        apart = (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).bit_count()
        assert abs(apart - 128) < 40
    assert seeds.RunStreams(bytes(32)).key_of_device(1, 1) != run.key_of_device(1, 1)


def test_secrets_are_drawn_afresh() -> None:
    assert len({seeds.draw_secret() for _ in range(10)}) == 10 and len(seeds.draw_secret()) == 32
