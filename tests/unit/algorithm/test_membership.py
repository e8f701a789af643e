"""Devices that join: means over all devices keep their definition, and samplers keep the number or the share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedhen.algorithm.local_variants import feddyn, scaffold
from fedhen.algorithm.merging import Memories, keep_tiers_apart, share_common_weights
from fedhen.algorithm.sampling import make_sampler, replace_absent
from fedhen.config.devices_settings import DevicesConfig
from fedhen.experiment.reported_models import AllDevicesAverage

EXAMPLES = {"simple": [10, 30], "complex": [20, 5, 15]}
JOINING = {"simple": [40], "complex": [25, 1]}


@pytest.mark.parametrize("pools", [share_common_weights, keep_tiers_apart])
@pytest.mark.parametrize("local", [scaffold(), feddyn(0.1)], ids=lambda local: local.name)
def test_the_mean_of_the_memories_is_by_definition_that_of_all_devices(local, pools) -> None:  # type: ignore[no-untyped-def]
    """Before and after others join with memories of zeros; in numpy, device by device and element by element.

    `body` is in both tiers, `wide` has a corner in the simple one, and `top` is only in the complex one.
    """
    shapes = {"simple": {"body": (3,), "wide": (1, 2)}, "complex": {"body": (3,), "wide": (2, 2), "top": (2,)}}
    draw = np.random.default_rng(0)
    memories = {
        tier: [{name: draw.normal(size=shape) for name, shape in shapes[tier].items()} for _ in counts]
        for tier, counts in EXAMPLES.items()
    }

    def mean_of(counts: dict[str, list[int]], tier: str, pool: tuple[str, ...], name: str) -> np.ndarray:
        devices = sum(len(counts[t]) for t in pool)
        examples = sum(sum(counts[t]) for t in pool)
        total = np.zeros((2, 2) if name == "wide" else shapes[tier][name])
        holders = np.zeros_like(total)
        for each in pool:
            if name not in shapes[each]:
                continue
            corner = tuple(slice(size) for size in shapes[each][name])
            for place, number in enumerate(counts[each]):
                omega = number * devices / examples
                weight = omega if local.name == "scaffold" else 1.0
                holders[corner] += 1
                if place < len(memories[each]):
                    total[corner] += weight * memories[each][place][name]
        corner = tuple(slice(size) for size in shapes[tier][name])
        mean: np.ndarray = total[corner] / holders[corner]
        return mean

    after = {tier: EXAMPLES[tier] + JOINING[tier] for tier in EXAMPLES}
    pool_of = {tier: pool for pool in pools(["simple", "complex"]) for tier in pool}

    def means(counts: dict[str, list[int]]) -> dict[str, dict[str, torch.Tensor]]:
        return {
            tier: {name: torch.from_numpy(mean_of(counts, tier, pool_of[tier], name)) for name in shapes[tier]}
            for tier in shapes
        }

    def omega(counts: dict[str, list[int]], tier: str) -> float:
        pool = pool_of[tier]
        return counts[tier][0] * sum(len(counts[t]) for t in pool) / sum(sum(counts[t]) for t in pool)

    growth = {tier: omega(after, tier) / omega(EXAMPLES, tier) for tier in shapes}
    before = Memories(means(EXAMPLES), {tier: len(counts) for tier, counts in EXAMPLES.items()})
    found = before.admit({tier: len(counts) for tier, counts in after.items()}, pools, local, growth)
    for tier, expected in means(after).items():
        for name, tensor in expected.items():
            torch.testing.assert_close(found.mean[tier][name], tensor, msg=f"{tier} {name}")
    assert found.tier_sizes == {"simple": 3, "complex": 5}


def test_a_newcomer_counts_with_the_initial_model_in_the_all_devices_average() -> None:
    """Of three devices one has trained: (5 + 2·1)/3. A fourth joins: (5 + 3·1)/4."""
    average = AllDevicesAverage({"simple": {"w": torch.ones(2)}}, ["simple"] * 3)
    average.restore(1, torch.full((2,), 5.0))
    torch.testing.assert_close(average.average("simple")["w"], torch.full((2,), 7 / 3))
    average.admit(["simple"] * 4)
    assert average.average("simple")["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("sampling", "drawn"), [("uniform", 10), ("by-tier", 10), ("loss", 10), ("bernoulli", 20)])
def test_samplers_keep_the_number_or_the_share_when_devices_join(sampling: str, drawn: int) -> None:
    """Of 50 devices 10 are active. When there are 100, still 10 are, or each of them with probability 10/50."""
    devices = DevicesConfig(number=50, active=10, sampling=sampling)  # type: ignore[arg-type]
    sampler = make_sampler(devices, 0, ["simple"] * 50 + ["complex"] * 50)
    chosen = [sampler(number, {}) for number in range(1, 401)]
    # The standard error of the mean of 400 draws with variance 16 is 0.2.
    assert np.mean([len(each) for each in chosen]) == pytest.approx(drawn, abs=0.8)
    # Each device of the second half is drawn in about a tenth or a fifth of the rounds.
    later = sum(device >= 50 for each in chosen for device in each) / len(chosen)
    assert later == pytest.approx(drawn / 2, abs=0.8)


def test_absent_devices_are_replaced_as_far_as_others_are_there() -> None:
    drawn = [1, 3, 5]
    assert replace_absent(drawn, range(9), 0, 1) == drawn
    for number in range(1, 20):
        active = replace_absent(drawn, [0, 1, 2, 5, 7], 0, number)
        assert len(active) == 3 and {1, 5} < set(active) <= {0, 1, 2, 5, 7}
    assert len({tuple(replace_absent(drawn, [0, 1, 2, 5, 7], 0, number)) for number in range(1, 20)}) == 3
    assert replace_absent(drawn, [1, 5], 0, 1) == [1, 5]
    assert replace_absent(drawn, [], 0, 1) == drawn
