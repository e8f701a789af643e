"""Splits deal every example exactly once, and always end."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhen.data import partitions
from fedhen.data.dataset import Index
from fedhen.errors import FedhenError


def is_disjoint_cover(shards: list[Index], total: int) -> bool:
    return sorted(np.concatenate(shards).tolist()) == list(range(total))


@given(st.integers(0, 99), st.integers(1, 30), st.integers(30, 200), st.integers(1, 7))
def test_iid_covers_with_sizes_within_one(seed: int, devices: int, total: int, classes: int) -> None:
    labels = np.arange(total) % classes
    shards = partitions.iid(labels, devices, np.random.default_rng(seed))
    assert is_disjoint_cover(shards, total)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(st.integers(0, 99), st.integers(1, 30), st.integers(30, 200), st.floats(1e-3, 1e3))
@settings(deadline=None)
def test_dirichlet_covers_with_sizes_within_one(seed: int, devices: int, total: int, alpha: float) -> None:
    labels = np.random.default_rng(seed).integers(0, 7, total)
    shards = partitions.dirichlet(labels, devices, np.random.default_rng(seed), alpha)
    assert is_disjoint_cover(shards, total)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(st.integers(0, 99), st.integers(1, 10), st.floats(0.05, 100))
@settings(deadline=None)
def test_by_class_covers_or_gives_up(seed: int, devices: int, alpha: float) -> None:
    labels = np.random.default_rng(seed).integers(0, 5, 300)
    try:
        shards = partitions.dirichlet_by_class(labels, devices, np.random.default_rng(seed), alpha, minimum=5)
    except FedhenError:
        return
    assert is_disjoint_cover(shards, len(labels))
    assert min(map(len, shards)) >= 5


def test_the_hardest_balanced_split_ends_in_seconds() -> None:
    """The loop that redraws a class until it hits one with images left ran for minutes here."""
    labels = np.repeat(np.arange(100), 500)
    began = time.process_time()
    shards = partitions.dirichlet(labels, 1000, np.random.default_rng(0), 0.01)
    assert time.process_time() - began < 20
    assert is_disjoint_cover(shards, len(labels))


@pytest.mark.slow
def test_by_class_gives_up_with_one_line() -> None:
    labels = np.repeat(np.arange(10), 500)
    with pytest.raises(FedhenError, match=r"split.alpha=0.01 .* 10 examples in 100 tries") as error:
        partitions.dirichlet_by_class(labels, 500, np.random.default_rng(0), 0.01)
    assert "\n" not in str(error.value)


def redrawn(labels: Index, devices: int, rng: np.random.Generator, alpha: float) -> list[list[int]]:
    """The original procedure: draw a class from the device's prior again and again until one has images left."""
    classes = int(labels.max()) + 1
    prior = rng.dirichlet([alpha] * classes, devices)
    left = [np.flatnonzero(labels == c).tolist() for c in range(classes)]
    quota = [len(labels) // devices] * devices
    hands: list[list[int]] = [[] for _ in range(devices)]
    while sum(quota):
        device = int(rng.integers(devices))
        if not quota[device]:
            continue
        quota[device] -= 1
        while True:
            c = int(rng.choice(classes, p=prior[device]))
            if left[c]:
                hands[device].append(left[c].pop())
                break
    return hands


@pytest.mark.slow
def test_balanced_dirichlet_is_distributed_as_the_original() -> None:
    """The mean share of a device's commonest class, over 60 splits each, against the procedure written out naively."""
    labels = np.repeat(np.arange(5), 40)

    def top_share(hands: list[Index] | list[list[int]]) -> float:
        return float(np.mean([np.bincount(labels[list(hand)]).max() / len(hand) for hand in hands]))

    ours = [top_share(partitions.dirichlet(labels, 10, np.random.default_rng(s), 0.5)) for s in range(60)]
    theirs = [top_share(redrawn(labels, 10, np.random.default_rng(1000 + s), 0.5)) for s in range(60)]
    error = np.sqrt(np.var(ours) / 60 + np.var(theirs) / 60)
    assert abs(np.mean(ours) - np.mean(theirs)) < 4 * error


def test_small_alpha_is_more_unequal() -> None:
    labels = np.repeat(np.arange(10), 100)

    def top_share(alpha: float) -> float:
        shards = partitions.dirichlet(labels, 20, np.random.default_rng(0), alpha)
        return float(np.mean([np.bincount(labels[s]).max() / len(s) for s in shards]))

    assert top_share(0.05) > top_share(0.3) > top_share(100.0)
    assert top_share(1000.0) < 0.25
