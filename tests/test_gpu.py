"""On a GPU: `pytest -m gpu`. The same code trains there, on data that lies there, and agrees with the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from families import two_exits
from fedhen import schema, toml
from fedhen.assembly import assemble
from fedhen.data.batches import batch, visits
from fedhen.data.dataset import Data, Normalisation
from fedhen.experiment import Experiment
from fedhen.recipes import recipe_named

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def experiment(accelerator: str, method: str, local: str) -> Experiment:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(120, 6))), torch.from_numpy(rng.integers(0, 3, 120))
    settings = {
        "method": method,
        "rounds": 3,
        "devices": {"number": 10, "active": 4},
        "model": {"family": "python"},
        "local": {"name": local},
        "training": {"epochs": 2, "batch_size": 4},
    }
    data = Data(x[:80], y[:80], x[80:], y[80:], 3)
    return assemble(schema.from_mapping(settings), data=data, family=two_exits(), accelerator=accelerator)


@pytest.mark.parametrize("local", ["plain", "fedprox", "scaffold", "feddyn"])
@pytest.mark.parametrize("method", ["fedhen", "noside", "decouple"])
def test_three_rounds_agree_with_the_cpu(method: str, local: str) -> None:
    """In float64, within 1e-9."""
    cpu, gpu = (experiment(where, method, local) for where in ("cpu", "cuda"))
    for a, b in zip(cpu.play(), gpu.play(), strict=True):
        assert a.record["active"] == b.record["active"]
    for tier, weights in cpu.server.items():
        for name, tensor in weights.items():
            torch.testing.assert_close(gpu.server[tier][name].cpu(), tensor, rtol=1e-9, atol=1e-9)


def test_images_lie_on_the_gpu_and_are_prepared_there_as_on_the_cpu() -> None:
    images = torch.randint(0, 256, (60, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(60) % 10
    here = Data(images, labels, images, labels, 10, normalisation=Normalisation((120.0,) * 3, (60.0,) * 3))
    there = here.to(torch.device("cuda"))
    assert there.x.is_cuda and there.x.dtype == torch.uint8
    plan = visits(np.arange(60), 1, 50, False, (0, 1, 2))
    for part in plan.batches():
        (x, y), (u, v) = (batch(data, plan, part, "crop-flip") for data in (here, there))
        assert u.is_cuda
        torch.testing.assert_close(u.cpu(), x, rtol=1e-6, atol=1e-6)
        assert torch.equal(v.cpu(), y)


def test_the_digits_learn_on_a_gpu() -> None:
    config = toml.with_settings(recipe_named("digits"), ["rounds=15"])
    records = [step.record for step in assemble(config, accelerator="cuda").play()]
    assert records[-1]["accuracy"]["server"]["simple"] > 0.75
