"""Gradients of meta-learning, against derivatives by hand, the exact Hessian, and autograd through the inner steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhen.algorithm.gradients import Batch, FirstOrder, Gradient, HessianFree, LossOf, ThroughInnerSteps
from fedhen.algorithm.local_training import group_batches
from fedhen.algorithm.objectives import sum_of_exits
from fedhen.algorithm.prototypes import FAR, NearestPrototype, PrototypeLoss
from support.families import TwoExits

ALPHA = 0.1


class Line(nn.Module):
    """One number: w·x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.w * x]


def half_square(logits: Sequence[Tensor], targets: Tensor) -> Tensor:
    return (logits[-1] - targets).square().mean() / 2


def number_batch(seed: int) -> Batch:
    x, y = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, y


@pytest.mark.parametrize("steps", [1, 3])
def test_a_line_by_hand(steps: int) -> None:
    """f(w; D) = mean (w·x − y)² / 2 has f' = m₂·w − m₁ and f'' = m₂, with m₂ = mean x² and m₁ = mean x·y.

    An inner step multiplies the error at the optimum by 1 − α·m₂, which is also its derivative.
    """
    (x, y), (z, t) = batches = [number_batch(0), number_batch(1)]
    w = torch.tensor(0.5, dtype=torch.float64)
    for _ in range(steps):
        w = w - ALPHA * ((x * x).mean() * w - (x * y).mean())
    outer = (z * z).mean() * w - (z * t).mean()
    through = outer * (1 - ALPHA * (x * x).mean()) ** steps
    for rule, expected in ((FirstOrder(ALPHA, steps), outer), (ThroughInnerSteps(ALPHA, steps), through)):
        line = Line()
        loss = rule.compute(LossOf(line, half_square), batches)
        assert line.w.item() == 0.5, "the weights are the same afterwards"
        assert line.w.grad is not None and line.w.grad.item() == pytest.approx(expected.item(), rel=1e-12)
        assert loss.item() == pytest.approx(float((w * z - t).square().mean() / 2), rel=1e-12)


def network(seed: int = 0) -> tuple[TwoExits, LossOf]:
    torch.manual_seed(seed)
    module = TwoExits(6, 3, deep=True)
    return module, LossOf(module, sum_of_exits)


def class_batch(seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(9, 6, dtype=torch.float64, generator=draw), torch.randint(0, 3, (9,), generator=draw)


def loss_function(module: nn.Module, batch: Batch) -> Callable[[Tensor], Tensor]:
    """Returns the loss as a function of all weights in one vector."""
    sizes = {name: p.shape for name, p in module.named_parameters()}

    def loss(vector: Tensor) -> Tensor:
        parts = torch.split(vector, [shape.numel() for shape in sizes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(sizes.items(), parts, strict=True)}
        h = torch.tanh(batch[0] @ named["body.weight"].T + named["body.bias"])
        g = torch.tanh(h @ named["deep.weight"].T + named["deep.bias"])
        exits = [h @ named["exit.weight"].T + named["exit.bias"], g @ named["top.weight"].T + named["top.bias"]]
        return torch.stack([functional.cross_entropy(z, batch[1]) for z in exits]).sum()

    return loss


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def flat_gradient(module: nn.Module) -> Tensor:
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in module.parameters()])


def test_hessian_free_against_the_exact_hessian() -> None:
    """g − α·H(D″)·g with g = ∇f(w − α∇f(w; D); D′); the difference of two gradients errs by δ²."""
    module, loss_of = network()
    batches = [class_batch(seed) for seed in range(3)]
    first, second, third = (loss_function(module, batch) for batch in batches)
    w = flat(module)
    inner = torch.func.grad(first)(w)
    outer = torch.func.grad(second)(w - ALPHA * inner)
    hessian = torch.func.hessian(third)(w)
    HessianFree(ALPHA, delta=1e-4).compute(loss_of, batches)
    torch.testing.assert_close(flat_gradient(module), outer - ALPHA * hessian @ outer, rtol=0, atol=1e-8)
    assert (ALPHA * hessian @ outer).norm() > 1e-3


@pytest.mark.parametrize("steps", [1, 4])
def test_maml_against_autograd_through_the_inner_steps(steps: int) -> None:
    module, loss_of = network()
    batches = [class_batch(0), class_batch(1)]
    first, second = (loss_function(module, batch) for batch in batches)

    def after_inner_steps(w: Tensor) -> Tensor:
        for _ in range(steps):
            w = w - ALPHA * torch.func.grad(first)(w)
        return second(w)

    expected = torch.func.grad(after_inner_steps)(flat(module))
    ThroughInnerSteps(ALPHA, steps).compute(loss_of, batches)
    torch.testing.assert_close(flat_gradient(module), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", [FirstOrder(ALPHA), HessianFree(ALPHA, 1e-3), ThroughInnerSteps(ALPHA)])
def test_a_weight_that_no_exit_reads_has_no_gradient(rule: Gradient) -> None:
    """So that neither decay nor clip touches it, as in training without meta-learning."""
    module, _ = network()
    loss_of = LossOf(module, lambda logits, y: functional.cross_entropy(logits[-1], y))
    rule.compute(loss_of, [class_batch(seed) for seed in range(rule.batches)])
    assert module.exit.weight.grad is None and module.body.weight.grad is not None


def test_batches_are_grouped() -> None:
    batches = [class_batch(seed) for seed in range(5)]
    assert [len(group) for group in group_batches(batches, 2)] == [2, 2]
    (only,) = group_batches(batches[:1], 3)
    assert all(each is batches[0] for each in only)


def test_prototypes_by_hand() -> None:
    """Of each exit: class means of batch 1's features, softmax of minus the squared distances of batch 2's.

    The gradient is that of these formulas, written out on the weights; the exits' own layers have none.
    """
    module, loss_of = network()
    (x, y), (z, t) = batches = [class_batch(3), class_batch(4)]
    y[y == 2] = 0  # batch 1 lacks a class
    kept = t != 2
    loss = PrototypeLoss(3).compute(loss_of, batches)
    found = {name: p.grad for name, p in module.named_parameters()}
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}

    def features(inputs: Tensor) -> list[Tensor]:
        h = torch.tanh(inputs @ weights["body.weight"].T + weights["body.bias"])
        return [h, torch.tanh(h @ weights["deep.weight"].T + weights["deep.bias"])]

    total = torch.zeros((), dtype=torch.float64)
    for one, query in zip(features(x), features(z[kept]), strict=True):
        means = torch.stack([one[y == c].mean(0) for c in (0, 1)])
        distances = torch.cdist(query, means).square()
        total = total + functional.cross_entropy(-distances, t[kept])
    assert loss.item() == pytest.approx(total.item(), rel=1e-9)
    total.backward()  # type: ignore[no-untyped-call]
    for name in ("body.weight", "body.bias", "deep.weight", "deep.bias"):
        torch.testing.assert_close(found[name], weights[name].grad)
    assert found["exit.weight"] is None and found["top.bias"] is None


def test_a_batch_of_unknown_classes_changes_nothing() -> None:
    module, loss_of = network()
    (x, y), (z, _) = class_batch(0), class_batch(1)
    PrototypeLoss(4).compute(loss_of, [(x, torch.zeros_like(y)), (z, torch.full_like(y, 3))])
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


def test_the_nearest_prototype_is_predicted() -> None:
    """Over several batches the class means are those of all examples, and a class without examples is far."""
    module, _ = network()
    x, y = class_batch(5)
    y[y == 1] = 2
    assert isinstance(x, Tensor)
    nearest = NearestPrototype(module, [(x[:4], y[:4]), (x[4:], y[4:])], 3)
    found = nearest(x)[0]
    h = torch.tanh(module.body(x)).detach()
    for c in (0, 2):
        torch.testing.assert_close(found[:, c], -(h - h[y == c].mean(0)).square().sum(1))
    assert bool((found[:, 1] == -FAR).all())
