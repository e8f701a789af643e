"""Alg. 2: the gradient of the summed loss, the clip, the decay."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedhen.algorithm.local_training import LocalProblem, clip_gradients, train_locally
from fedhen.algorithm.objectives import last_exit, sum_of_exits
from fedhen.config.training_settings import TrainingConfig
from fedhen.models.family import weights_of
from support.families import TwoExits, two_exits


def random_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (8,), generator=generator)


def test_the_gradient_of_the_summed_loss_is_the_sum_of_two_gradients() -> None:
    """∇(f(w) + f([w]_M)) = ∇f(w) + ∇f([w]_M), the right side from two separate models and two backward passes."""
    torch.manual_seed(0)
    complex_ = TwoExits(6, 3, deep=True)
    simple = TwoExits(6, 3, deep=False)
    simple.load_state_dict({name: complex_.state_dict()[name] for name in simple.state_dict()})
    x, y = random_batch()
    summed = torch.autograd.grad(sum_of_exits(complex_(x), y), list(complex_.parameters()))
    own = torch.autograd.grad(
        torch.nn.functional.cross_entropy(complex_(x)[1], y), list(complex_.parameters()), allow_unused=True
    )
    side = dict(
        zip(
            dict(simple.named_parameters()),
            torch.autograd.grad(torch.nn.functional.cross_entropy(simple(x)[0], y), list(simple.parameters())),
            strict=True,
        )
    )
    for (name, weight), total, deep in zip(complex_.named_parameters(), summed, own, strict=True):
        expected = side.get(name, torch.zeros_like(weight)) + (torch.zeros_like(weight) if deep is None else deep)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)


class OneWeight(torch.nn.Module):
    """Two logits (w·x, 0), so that the gradient can be written down."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(w, dtype=torch.float64))
        self.unused = torch.nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack([self.w * x, torch.zeros_like(x)], dim=1)]


@pytest.mark.parametrize("x", [1.0, 1000.0])
def test_one_clipped_step_with_decay_by_hand(x: float) -> None:
    """For label 1 the loss is log(1 + e^{wx}) and its gradient x·σ(wx): with w = 0 that is x / 2.

    x = 1: 0.5 is under the clip of 10. x = 1000: 500 is cut to 10. Then decay 0.1 · w is added, outside the clip, and
    w ← w − 0.5 · (g + 0.1 · w). To see the decay, w starts at 0.002 / x, where σ is still about a half.
    """
    w = 0.002 / x
    gradient = x / (1 + math.exp(-w * x))
    clipped = gradient if gradient < 10 else gradient * 10 / (gradient + 1e-6)
    expected = w - 0.5 * (clipped + 0.1 * w)
    module = OneWeight(w)
    batch = (torch.tensor([x], dtype=torch.float64), torch.tensor([1]))
    loss, steps = train_locally(
        module, [batch], LocalProblem(sum_of_exits, TrainingConfig(clip=10.0, weight_decay=0.1), lr=0.5)
    )
    assert steps == 1
    assert module.w.item() == pytest.approx(expected, rel=1e-12)
    assert loss == pytest.approx(math.log(1 + math.exp(w * x)), rel=1e-12)
    assert module.unused.item() == 3.0, "a weight without a gradient gets no decay"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_clip_is_that_of_torch_to_the_bit(dtype: torch.dtype) -> None:
    """Three gradients, one with the channels last, and a clip that cuts; a weight without a gradient is left out."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(7, 5), (3,), (4, 3, 3, 3), (2,)]]
    for parameter in parameters[:3]:
        parameter.grad = torch.randn_like(parameter) * 3
    ours = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    clip_gradients(ours, 2.0)
    torch.nn.utils.clip_grad_norm_(parameters, 2.0)
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, parameters[:3], strict=True) if p.grad is not None)


def test_nosides_exit_comes_back_from_a_complex_device_as_it_went() -> None:
    torch.manual_seed(0)
    module = two_exits().build("complex")
    before = weights_of(module)
    train_locally(
        module, [random_batch(s) for s in range(3)], LocalProblem(last_exit, TrainingConfig(weight_decay=0.1), lr=0.1)
    )
    after = weights_of(module)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {n for n in before if not n.startswith("exit.")}


def test_the_norm_is_over_all_parameters_of_the_summed_loss() -> None:
    """One step with a tiny clip moves the weights by lr · clip in all, whatever the number of exits."""
    torch.manual_seed(0)
    module = two_exits().build("complex")
    before = weights_of(module)
    train_locally(
        module, [random_batch()], LocalProblem(sum_of_exits, TrainingConfig(clip=0.01, weight_decay=0.0), lr=1.0)
    )
    after = weights_of(module)
    moved = np.sqrt(sum(float((after[n] - before[n]).square().sum()) for n in before))
    assert moved == pytest.approx(0.01, rel=1e-3)
