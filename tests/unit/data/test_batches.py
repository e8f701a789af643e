"""Visits, crops and flips."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhen.data.augmentation import PADDING
from fedhen.data.batches import make_batch, plan_visits
from fedhen.data.dataset import Data
from fedhen.data.spec import Normalisation
from fedhen.seeds import DeviceStreams


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 15), st.booleans())
def test_every_epoch_visits_every_example_once(size: int, epochs: int, batch_size: int, drop: bool) -> None:
    shard = np.arange(100, 100 + size)
    plan = plan_visits(shard, epochs, batch_size, drop, DeviceStreams(0, (1, 2)))
    sizes = [part.stop - part.start for part in plan.batches()]
    full, rest = divmod(size, batch_size)
    short = [] if rest == 0 or (drop and full) else [rest]
    assert sizes == ([batch_size] * full + short) * epochs
    if not drop:
        for epoch in plan.examples.reshape(epochs, size):
            assert sorted(epoch) == shard.tolist()


def test_epochs_rounds_and_devices_have_different_orders() -> None:
    shard = np.arange(50)
    plan = plan_visits(shard, 2, 10, False, DeviceStreams(0, (1, 2)))
    assert plan.examples[:50].tolist() != plan.examples[50:].tolist()
    for seed, *where in ((1, 1, 2), (0, 2, 2), (0, 1, 3)):
        other = DeviceStreams(seed, tuple(where))
        assert plan_visits(shard, 2, 10, False, other).examples.tolist() != plan.examples.tolist()
    assert plan_visits(shard, 2, 10, False, DeviceStreams(0, (1, 2))).examples.tolist() == plan.examples.tolist()


@pytest.mark.parametrize("augmentation", ["crop-flip", "half-crop-flip"])
def test_crop_and_flip_against_one_image_at_a_time(augmentation: str) -> None:
    """Each image: subtract, divide, pad with zeros after that, cut the window, mirror it if flipped."""
    images = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(12) % 4
    mean, std = (100.0, 120.0, 90.0), (50.0, 60.0, 70.0)
    data = Data(images, labels, images, labels, 4, normalisation=Normalisation(mean, std))
    plan = plan_visits(np.arange(12), 1, 12, False, DeviceStreams(3, (1, 0)))
    x, y = make_batch(data, plan, slice(0, 12), augmentation)
    for visit, example in enumerate(plan.examples):
        image = images[example].numpy().astype(np.float64)
        normal = (image - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]
        padded = np.zeros((3, 8 + 2 * PADDING, 8 + 2 * PADDING))
        padded[:, PADDING : PADDING + 8, PADDING : PADDING + 8] = normal
        left_alone = augmentation == "half-crop-flip" and not plan.draws.crops[visit]
        top, left = (PADDING, PADDING) if left_alone else plan.draws.corners[visit]
        window = padded[:, top : top + 8, left : left + 8]
        expected = window[:, :, ::-1] if plan.draws.flips[visit] else window
        np.testing.assert_allclose(x[visit].numpy(), expected, rtol=1e-5, atol=1e-6)
        assert y[visit] == labels[example]
    assert (
        plan.draws.flips.any() and not plan.draws.flips.all() and plan.draws.crops.any() and not plan.draws.crops.all()
    )


def test_crops_reach_every_corner_evenly() -> None:
    plan = plan_visits(np.arange(5000), 2, 50, False, DeviceStreams(0, (1, 0)))
    counts = np.bincount(plan.draws.corners.ravel())
    assert len(counts) == 2 * PADDING + 1
    assert counts.min() > 0.9 * counts.mean()
    for coins in (plan.draws.flips, plan.draws.crops, plan.draws.flips ^ plan.draws.crops):
        assert abs(coins.mean() - 0.5) < 0.03
