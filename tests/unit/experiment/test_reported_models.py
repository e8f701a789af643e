"""The all-devices average of large models, which is summed in blocks."""

from __future__ import annotations

import numpy as np
import torch

from fedhen.algorithm.updates import Update
from fedhen.exact_sums import BLOCK
from fedhen.experiment.reported_models import AllDevicesAverage, average_rows


def test_a_model_of_several_blocks_is_averaged_weight_by_weight() -> None:
    """Three devices: the first trains twice, the second once, the third never. By numpy's integers."""
    size = 2 * BLOCK + 3
    initial, *trained = (torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    models = AllDevicesAverage({"all": {"w": initial}}, ["all"] * 3)
    for device, weights in zip((0, 1, 0), trained, strict=True):
        models.take([Update(device, "all", {"w": weights}, frozenset("w"), 1, 0.0)])
    last = [trained[2], trained[1], initial]
    steps = sum(np.rint(row.double().numpy() * 2.0**36).astype(np.int64) for row in last)
    expected = torch.from_numpy(steps / 3 / 2.0**36).float()
    assert torch.equal(models.average("all")["w"], expected)
    assert torch.equal(average_rows({"w": initial}, last[:2], 3)["w"], expected)
