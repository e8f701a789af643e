"""What devices minimise, against computations written out here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedhen.algorithm.objectives import SumOfExits, last_exit, sum_of_exits
from fedhen.config import validation
from fedhen.data.dataset import Data
from fedhen.experiment.build import build_experiment
from fedhen.models.lazy_exits import LazyExits
from fedhen.params import Average
from support.families import two_exits


def test_label_rows_by_hand() -> None:
    """Rows 0 and 1 of a 3×1 output from device A (1, 2, 3), rows 1 and 2 from B (10, 20, 30): 1, (2 + 20) / 2, 30."""
    average = Average({"w": (3, 1)})
    average.add({"w": torch.tensor([[1.0], [2.0], [3.0]])}, 1.0, {"w": torch.tensor([True, True, False])})
    average.add({"w": torch.tensor([[10.0], [20.0], [30.0]])}, 1.0, {"w": torch.tensor([False, True, True])})
    assert average.finish({"w": torch.zeros(3, 1)})["w"].flatten().tolist() == [1.0, 11.0, 30.0]


def test_masked_loss_by_hand() -> None:
    """A device with classes 0 and 2 of 3: the logit of class 1 counts as 0 in its loss; its gradient is 0 there."""
    x, y = torch.randn(6, 6, dtype=torch.float64), torch.tensor([0, 2, 2, 1, 1, 1])
    shards = (np.array([0, 1, 2]), np.array([3, 4, 5]))
    settings = {"model": {"family": "python"}, "devices": {"number": 2, "active": 1}, "training": {"masked_loss": True}}
    config = validation.from_mapping(settings)
    run = build_experiment(config, data=Data(x, y, x, y, 3, shards), family=two_exits(), accelerator="cpu")
    logits = torch.tensor([[1.0, 5.0, -2.0]], requires_grad=True, dtype=torch.float64)
    (seen,) = run.engine.devices.sequential.logit_mask(0)([logits])  # type: ignore[attr-defined]
    loss = cross_entropy(seen, torch.tensor([2]))
    expected = math.log(math.exp(1.0) + math.exp(0.0) + math.exp(-2.0)) + 2.0
    assert loss.item() == pytest.approx(expected)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and logits.grad[0, 1] == 0 and logits.grad[0, 0] != 0


def test_an_unused_exit_is_not_computed() -> None:
    asked = []

    def thunk(place: int) -> Tensor:
        asked.append(place)
        return torch.zeros(2, 3, requires_grad=True)

    logits = LazyExits([lambda: thunk(0), lambda: thunk(1)])
    last_exit(logits, torch.tensor([0, 1]))
    assert asked == [1] and len(logits) == 2
    sum_of_exits(logits, torch.tensor([0, 1]))
    assert asked == [1, 0]


def test_distillation_by_hand() -> None:
    """Two exits at T = 2: λ·T²·(KL(q₂‖q₁) + KL(q₁‖q₂)) beside the two cross-entropies, in numpy."""
    z = [np.array([[1.0, 2.0, 0.5]]), np.array([[0.0, 1.0, 3.0]])]

    def softmax(v: Any) -> Any:
        e = np.exp(v)
        return e / e.sum()

    q = [softmax(v / 2) for v in z]
    kl = [float((q[1] * np.log(q[1] / q[0])).sum()), float((q[0] * np.log(q[0] / q[1])).sum())]
    expected = -sum(math.log(softmax(v)[0, 1]) for v in z) + 0.3 * 4 * sum(kl)
    objective = SumOfExits(slice(None), distillation=0.3, temperature=2.0)
    found = objective([torch.from_numpy(v) for v in z], torch.tensor([1]))
    assert found.item() == pytest.approx(expected)
    lone = objective([torch.from_numpy(z[0])], torch.tensor([1]))
    assert lone.item() == pytest.approx(-math.log(softmax(z[0])[0, 1])), "an only exit has nobody to learn from"


def test_teachers_are_held_fixed() -> None:
    """The gradient of the distillation at one exit is that of KL towards the other's constant output, T²(p − q)/T."""
    a = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([[0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    objective = SumOfExits(slice(None), distillation=1.0, temperature=2.0)
    plain = sum_of_exits([a, b], torch.tensor([0]))
    (with_it,), (without,) = (
        torch.autograd.grad(f, a, retain_graph=True) for f in (objective([a, b], torch.tensor([0])), plain)
    )
    expected = 2.0 * (torch.softmax(a / 2, 1) - torch.softmax(b / 2, 1))
    torch.testing.assert_close(with_it - without, expected.detach())


def test_exit_weights_by_hand() -> None:
    logits, labels = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])], torch.tensor([0])
    objective = SumOfExits(slice(None), exits=("simple", "complex"), weights={"simple": 0.25})
    expected = 0.25 * math.log(1 + math.exp(-1)) + math.log(1 + math.exp(3))
    assert objective(logits, labels).item() == pytest.approx(expected)
