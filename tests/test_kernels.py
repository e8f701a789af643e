"""The GPU kernels against torch: on a GPU, or on a CPU through Triton's interpreter (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedhen.models.preact_resnet import mixed

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device"),
]
WHERE = "cuda" if torch.cuda.is_available() else "cpu"


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(WHERE, dtype).contiguous(memory_format=torch.channels_last)


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return float((found.double() - expected.double()).norm()) <= tolerance * float(expected.double().norm())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("shape", [(3, 16, 8, 8), (2, 12, 5, 7), (2, 64, 32, 32), (1, 6, 1, 1)])
@pytest.mark.parametrize("adds", [False, True])
def test_norm_and_relu(shape: tuple[int, ...], adds: bool) -> None:
    from fedhen.runtimes.gpu.norms import _NormRelu

    x, other = (images(*shape).mul_(2).add_(1).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(shape[1], device=WHERE, requires_grad=True) for _ in range(2))
    onto, beside = images(*shape), images(*shape)
    total = x + other if adds else x
    y = F.relu(F.group_norm(total, 2, weight, bias))
    if adds:
        expected = torch.autograd.grad([total, y], [x, other, weight, bias], [beside, onto])
        pair = _NormRelu.apply(x, other, weight, bias, 2, 1e-5)
        found = torch.autograd.grad(pair, [x, other, weight, bias], [beside, onto])
        out = pair[1]
    else:
        expected = torch.autograd.grad(y, [x, weight, bias], onto)
        out = _NormRelu.apply(x, None, weight, bias, 2, 1e-5)
        found = torch.autograd.grad(out, [x, weight, bias], onto)
    assert close(out.detach(), y.detach(), 1e-5)
    assert all(close(a, b, 1e-4) for a, b in zip(found, expected, strict=True))


def test_mix_pooling() -> None:
    from fedhen.runtimes.gpu.pooling import _MixPool

    x, alpha = images(3, 6, 8, 8).requires_grad_(), torch.tensor(0.3, device=WHERE, requires_grad=True)
    onto = torch.randn(3, 6, 2, 2, device=WHERE)
    found, expected = _MixPool.apply(x, alpha, 4), mixed(x, alpha, 4)
    assert close(found.detach(), expected.detach(), 1e-6)
    both = (torch.autograd.grad(y, [x, alpha], onto) for y in (found, expected))
    assert all(close(a, b, 1e-5) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("shape", [(2, 64, 64, 8), (1, 128, 64, 4), (3, 64, 128, 6)])
def test_weight_gradients(shape: tuple[int, int, int, int]) -> None:
    """In bf16 the products are exact in float32 and only their sum is rounded."""
    from fedhen.runtimes.gpu.convolutions import weight_gradient

    n, channels, kernels, size = shape
    low = torch.bfloat16 if WHERE == "cuda" else torch.float32
    x, dy = images(n, channels, size, size, dtype=low), images(n, kernels, size, size, dtype=low)
    weight = torch.zeros(kernels, channels, 3, 3, dtype=torch.float64, device=WHERE, requires_grad=True)
    (expected,) = torch.autograd.grad(F.conv2d(x.double(), weight, padding=1), [weight], dy.double())
    assert close(weight_gradient(dy, x), expected, 4e-3 if WHERE == "cuda" else 1e-5)


def test_the_first_layer() -> None:
    from fedhen.runtimes.gpu.convolutions import _Stem

    low = torch.bfloat16 if WHERE == "cuda" else torch.float32
    x, weight = images(2, 3, 5, 6, dtype=low), images(8, 3, 3, 3, dtype=low).requires_grad_()
    onto = images(2, 8, 5, 6, dtype=low)
    expected = F.conv2d(x.double(), weight.double(), padding=1)
    found = _Stem.apply(x, weight)
    tolerance = 1e-2 if WHERE == "cuda" else 1e-5
    assert close(found.detach(), expected.detach(), tolerance)
    (a,), (b,) = torch.autograd.grad(found, weight, onto), torch.autograd.grad(expected, weight, onto.double())
    assert close(a, b, tolerance)


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_update_is_clipped_sgd(corrects: bool, momentum: float) -> None:
    """Two steps against torch's optimiser and clip, on a weight in bf16 and one in float32."""
    from fedhen.runtimes.gpu import updates
    from fedhen.runtimes.gpu.layout import Layout

    shapes = {"a": torch.Size([20000]), "b": torch.Size([70])}
    layout = Layout({"a": 0, "b": 20032}, shapes, 20160, 20032, torch.empty(0))
    held = torch.zeros(20160, dtype=torch.bool)
    held[:20000] = held[20032:20102] = True
    start, offset, gradient = (torch.where(held, torch.randn(20160), 0).to(WHERE) for _ in range(3))
    gradient[:20000] = gradient[:20000].bfloat16().float()
    state = updates.new_state(layout, start, corrects, momentum > 0)
    state.weights.copy_(start)
    if state.offset is not None:
        state.offset.copy_(offset)
    pull = 0.3 if corrects else 0.0
    state.settings.copy_(torch.tensor([0.1, 10.0, pull, 0.01, momentum]))
    parts = {"a": gradient[:20000].bfloat16(), "b": gradient[20032:20102].clone()}
    table = torch.tensor(updates.addresses(layout, state.blocks, parts), device=WHERE)
    weights = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([weights], lr=0.1, momentum=momentum, weight_decay=0.01)
    for _ in range(2):
        weights.grad = gradient + (offset + pull * weights.detach() if corrects else 0)
        torch.nn.utils.clip_grad_norm_([weights], 10.0)
        sgd.step()
        updates.update(state, table)
    assert close(state.weights, weights.detach(), 1e-6)
    assert close(state.low, weights.detach()[:20032], 4e-3)
