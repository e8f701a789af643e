"""Two forms of a module are compared by what they compute at random weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedhen.engines.equivalence import KINK_FACTOR, _gradient_error, _relative_error, forms_agree


class _Kink(torch.nn.Module):
    """max(w − at, 0), whose slope turns over where w is at that place."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.w, self.at, self.seen = torch.nn.Parameter(torch.ones(())), at, list[float]()

    def forward(self, x: Tensor) -> list[Tensor]:
        self.seen.append(float(self.w.detach()))
        return [torch.relu(self.w - self.at) * torch.ones_like(x)]


def test_a_kink_that_rounding_moves_is_not_taken_for_another_function() -> None:
    """Two forms whose kinks are 2e-7 apart differ in slope only between these; forms with kinks 1 apart, everywhere."""
    probe, x = _Kink(0.0), torch.ones(3)
    assert forms_agree(probe, probe, x)
    at = probe.seen[0]
    here, there, elsewhere = _Kink(at - 1e-7), _Kink(at + 1e-7), _Kink(at - 1)
    there.w = elsewhere.w = here.w
    assert _gradient_error(0, here, there, x) > KINK_FACTOR
    assert forms_agree(here, there, x)
    assert len({*here.seen}) > 1, "the draws are of different weights"
    assert not forms_agree(here, elsewhere, x)
    assert float(here.w.detach()) == 1.0, "the weights are as they were"


class _Slopes(torch.nn.Module):
    """Ten products of weights and inputs, the gradient of the first off by a factor, another one in each pass.

    A factor of 1.01 is ten times what rounding explains, and could be a kink; one of 1.03, thirty times, could not.
    """

    def __init__(self, weights: torch.nn.ParameterList, *factors: float) -> None:
        super().__init__()
        self.weights, self.factors = weights, iter(factors)

    def forward(self, x: Tensor) -> list[Tensor]:
        factor, first = next(self.factors), self.weights[0] * x
        first.register_hook(lambda gradient: factor * gradient)
        return [first + sum(w * x for w in self.weights[1:])]


def _verdict(*factors: float) -> bool:
    weights = torch.nn.ParameterList(torch.ones(50) for _ in range(10))
    return forms_agree(_Slopes(weights, *[1.0] * len(factors)), _Slopes(weights, *factors), torch.ones(50))


@pytest.mark.parametrize("factor", [1.003, 1.01, 1.5])
def test_a_gradient_that_is_always_off_is_found(factor: float) -> None:
    """Even where it is one of ten, and where each time a kink could be the cause."""
    assert _verdict(*[1.0] * 20)
    assert not _verdict(*[factor] * 20)


def test_three_draws_decide_whether_two_forms_are_the_same() -> None:
    """Those with kinks say nothing; of the others three decide, of twenty draws in all."""
    assert _verdict(*[1.01] * 17, 1.0, 1.0, 1.0)
    assert not _verdict(*[1.01] * 18, 1.0, 1.0)
    assert _verdict(1.03, 1.0, 1.03, 1.0, 1.0)
    assert not _verdict(1.03, 1.0, 1.03, 1.0, 1.03, *[1.0] * 15)
    assert not _verdict(*[float("nan")] * 3, *[1.0] * 17)


def test_small_gradients_in_half_precision_are_not_lost() -> None:
    """Beside 1e-4 a hundred-thousandth is zero in sixteen bits, and a gradient of zero would be compared with that."""
    gradients = [torch.full((50,), 1e-4).half(), torch.zeros(50).half()]
    assert _relative_error(gradients, gradients) == 0


@pytest.mark.parametrize(("slope", "same"), [(1e-6, True), (1e-4, False)])
def test_a_gradient_that_cancels_out_is_seen_beside_the_largest(slope: float, same: bool) -> None:
    """Rounding leaves something of it, which is not to be compared with nothing."""

    class Module(torch.nn.Module):
        def __init__(self, weights: torch.nn.ParameterList, slope: float) -> None:
            super().__init__()
            self.weights, self.slope = weights, slope

        def forward(self, x: Tensor) -> list[Tensor]:
            large, cancelled = self.weights
            return [large * x + self.slope * cancelled * x]

    weights = torch.nn.ParameterList([torch.ones(50), torch.ones(50)])
    assert forms_agree(Module(weights, 0.0), Module(weights, slope), torch.ones(50)) is same


@pytest.mark.parametrize(
    "other",
    [
        lambda z: [1.01 * z - 0.01 * z.detach() + 1],
        lambda z: [z, z],
        lambda z: [z * float("nan")],
        lambda z: [z + 0.01],
    ],
)
def test_logits_that_differ_are_found_at_every_draw(other: Callable[[Tensor], list[Tensor]]) -> None:
    """No kink explains them; here the gradients of the last form are right, and large compared with its logits."""

    class Module(torch.nn.Module):
        def __init__(self, weight: torch.nn.Parameter, form: Callable[[Tensor], list[Tensor]]) -> None:
            super().__init__()
            self.weight, self.form = weight, form

        def forward(self, x: Tensor) -> list[Tensor]:
            return self.form(1000 * (self.weight - self.weight.detach()) + x)

    weight = torch.nn.Parameter(torch.ones(50))
    one, two = Module(weight, lambda z: [z]), Module(weight, other)
    assert _gradient_error(0, one, one, torch.ones(50)) == 0
    assert _gradient_error(0, one, two, torch.ones(50)) > KINK_FACTOR


def test_the_comparison_does_not_change_running_statistics() -> None:
    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> list[Tensor]:
            return [self.norm(x)]

    module = Counts().train()
    assert forms_agree(module, module, torch.arange(32.0).view(8, 4) ** 2)
    assert module.norm.running_mean is not None
    assert not module.norm.running_mean.any()
