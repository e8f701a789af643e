"""The GPU kernels against torch: on a GPU if there is one, else on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedhen.models.pooling import mix_pool2d
from support.marks import first_is_quick

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton is made for Linux alone")
pytestmark = [pytest.mark.gpu] * (WHERE == "cuda")


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(WHERE, dtype).contiguous(memory_format=torch.channels_last)


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return float((found.double() - expected.double()).norm()) <= tolerance * float(expected.double().norm())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("shape", [(3, 16, 8, 8), (2, 12, 5, 7), (2, 64, 32, 32), (1, 6, 1, 1)])
@pytest.mark.parametrize("adds", first_is_quick([False, True]))
def test_norm_and_relu(shape: tuple[int, ...], adds: bool) -> None:
    from fedhen.engines.cuda.norms import _NormRelu

    x, other = (images(*shape).mul_(2).add_(1).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(shape[1], device=WHERE, requires_grad=True) for _ in range(2))
    onto, onto_sum = images(*shape), images(*shape)
    total = x + other if adds else x
    y = F.relu(F.group_norm(total, 2, weight, bias))
    if adds:
        expected = torch.autograd.grad([total, y], [x, other, weight, bias], [onto_sum, onto])
        pair = _NormRelu.apply(x, other, weight, bias, 2, 1e-5)
        found = torch.autograd.grad(pair, [x, other, weight, bias], [onto_sum, onto])
        out = pair[1]
    else:
        expected = torch.autograd.grad(y, [x, weight, bias], onto)
        out = _NormRelu.apply(x, None, weight, bias, 2, 1e-5)
        found = torch.autograd.grad(out, [x, weight, bias], onto)
    assert close(out.detach(), y.detach(), 1e-5)
    assert all(close(a, b, 1e-4) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("size", "kernel"), first_is_quick([(8, 4), (6, 3), (16, 16)]))
def test_mix_pooling(size: int, kernel: int) -> None:
    """Over windows, and over the whole image, whose kernel would take minutes to compile were it written out."""
    from fedhen.engines.cuda.pooling import _MixPool

    # After a ReLU many are equal; the first of them has the maximum's gradient.
    x = torch.relu(images(3, 6, size, size) - 1).requires_grad_()
    alpha = torch.tensor(0.3, device=WHERE, requires_grad=True)
    onto = torch.randn(3, 6, size // kernel, size // kernel, device=WHERE)
    found, expected = _MixPool.apply(x, alpha, kernel), mix_pool2d(x, alpha, kernel)
    assert close(found.detach(), expected.detach(), 1e-6)
    both = (torch.autograd.grad(y, [x, alpha], onto) for y in (found, expected))
    assert all(close(a, b, 1e-5) for a, b in zip(*both, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 64, 64, 8), (1, 128, 64, 4), (3, 64, 128, 6)])
def test_weight_gradients(shape: tuple[int, int, int, int]) -> None:
    """In bf16 the products are exact in float32 and only their sum is rounded."""
    from fedhen.engines.cuda.convolutions import weight_gradient

    n, channels, kernels, size = shape
    low = torch.bfloat16 if WHERE == "cuda" else torch.float32
    x, dy = images(n, channels, size, size, dtype=low), images(n, kernels, size, size, dtype=low)
    weight = torch.zeros(kernels, channels, 3, 3, dtype=torch.float64, device=WHERE, requires_grad=True)
    (expected,) = torch.autograd.grad(F.conv2d(x.double(), weight, padding=1), [weight], dy.double())
    assert close(weight_gradient(dy, x), expected, 4e-3 if WHERE == "cuda" else 1e-5)


def test_the_first_layer() -> None:
    from fedhen.engines.cuda.convolutions import _Stem

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
@pytest.mark.parametrize("momentum", first_is_quick([0.9, 0.0]))
def test_the_update_is_clipped_sgd(corrects: bool, momentum: float) -> None:
    """Two steps against torch's optimiser and clip, on a weight in bf16 and one in float32."""
    from fedhen.engines.cuda import updates
    from fedhen.engines.cuda.layout import Layout

    shapes = {"a": torch.Size([20000]), "b": torch.Size([70])}
    layout = Layout({"a": 0, "b": 20032}, shapes, 20160, 20032, torch.empty(0))
    held = torch.zeros(20160, dtype=torch.bool)
    held[:20000] = held[20032:20102] = True
    start, offset, gradient = (torch.where(held, torch.randn(20160), 0).to(WHERE) for _ in range(3))
    gradient[:20000] = gradient[:20000].bfloat16().float()
    state = updates.make_state(layout, start, corrects, momentum > 0)
    state.weights.copy_(start)
    if state.offset is not None:
        state.offset.copy_(offset)
    pull = 0.3 if corrects else 0.0
    state.settings.copy_(torch.tensor([0.1, 10.0, pull, 0.01, momentum]))
    parts = {"a": gradient[:20000].bfloat16(), "b": gradient[20032:20102].clone()}
    table = torch.tensor(updates.find_addresses(layout, state.blocks, parts), device=WHERE)
    weights = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([weights], lr=0.1, momentum=momentum, weight_decay=0.01)
    for _ in range(2):
        weights.grad = gradient + (offset + pull * weights.detach() if corrects else 0)
        torch.nn.utils.clip_grad_norm_([weights], 10.0)
        sgd.step()
        updates.update(state, table)
    assert close(state.weights, weights.detach(), 1e-6)
    assert close(state.low, weights.detach()[:20032], 4e-3)


def test_a_rewritten_network_computes_the_same() -> None:
    """Norms with their ReLU, the exit's pool and simple 3×3 convolutions are replaced, and no weight is renamed."""
    from fedhen.engines.cuda.fusing import rewrite as rewrite
    from fedhen.engines.equivalence import forms_agree
    from fedhen.models.preact_resnet import Shape, preact_resnet

    family = preact_resnet(Shape(widths=(16, 32, 64, 128), blocks=(1, 2, 1, 1)))
    module = family.build("complex").to(WHERE).train()
    rewritten = rewrite(module)
    names = [getattr(node.target, "__name__", "") for node in rewritten.graph.nodes]
    assert names.count("norm_relu") + names.count("add_norm_relu") == 10
    assert (names.count("mix_pool"), names.count("stem"), names.count("conv3x3")) == (1, 1, 7)
    assert dict(rewritten.named_parameters()).keys() == dict(module.named_parameters()).keys()
    x = torch.randn(4, 3, 32, 32, device=WHERE)
    assert forms_agree(module, rewritten, x)


@pytest.mark.parametrize("tier", first_is_quick(["simple", "complex"]))
@pytest.mark.parametrize("pool", first_is_quick([4, 1]))
@pytest.mark.parametrize("classes", first_is_quick([10, 100]))
def test_the_papers_networks_are_rewritten(classes: int, pool: int, tier: str) -> None:
    """Left as they are, they would train all the same, at half the speed."""
    from fedhen.engines.cuda.fusing import fuse
    from fedhen.models.preact_resnet import Shape, preact_resnet

    module = preact_resnet(Shape(classes=classes, exit_pool=pool)).build(tier).to(WHERE).train()
    assert fuse(module, torch.randn(2, 3, 32, 32, device=WHERE), tier) is not module


def test_a_module_that_cannot_be_traced_stays_as_it_is() -> None:
    from fedhen.engines.cuda.fusing import fuse

    class Branches(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    module = Branches()
    with pytest.warns(UserWarning, match="tier 'branches' runs as it is written, which is slower: TraceError") as said:
        assert all(fuse(module, torch.randn(2, 3), "branches") is module for _ in range(3))
    assert len(said) == 1


def test_weights_lie_in_a_vector_and_come_back() -> None:
    from fedhen.engines.cuda.layout import ALIGNMENT, make_layout
    from fedhen.models.preact_resnet import Shape, preact_resnet

    module = preact_resnet(Shape(widths=(8, 12, 16, 20), groups=1)).build("complex")
    weights = {name: p.detach() for name, p in module.named_parameters()}
    layout = make_layout(module, weights, lower=True)
    vector = layout.scatter(layout.gather(weights))
    assert all(torch.equal(layout.view(vector, name), w) for name, w in weights.items())
    assert all(torch.equal(back, weights[name]) for name, back in layout.unflatten(vector).items())
    assert all(begin % ALIGNMENT == 0 for begin in layout.offsets.values())
    # Products' weights come first; norms and the pool's mix keep full precision.
    low = {name for name, begin in layout.offsets.items() if begin < layout.low_size}
    assert {name for name in weights if "norm" in name or "alpha" in name} == weights.keys() - low


class _Tricky(torch.nn.Module):
    """What a rewriting must not trip over: keywords, a view of an image as a row, and, if wanted, a sum in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.one, self.two = (torch.nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.head, self.in_place = torch.nn.GroupNorm(2, 8), torch.nn.Linear(8 * 16, 3), in_place

    def forward(self, x: Tensor) -> list[Tensor]:
        y = kept = self.one(input=x)
        if self.in_place:
            y += self.two(x)
        else:
            y = y + self.two(x)
        y = torch.relu(self.norm(input=y)) + kept
        return [self.head(y.view(x.size(0), 8 * 16))]


def test_a_tricky_module_is_not_changed_by_its_rewriting() -> None:
    from fedhen.engines.cuda.fusing import fuse

    module, x = _Tricky(in_place=False).to(WHERE), torch.randn(2, 8, 4, 4, device=WHERE)
    expected = module(x)[0].detach()
    found = fuse(module, x, "tricky")
    assert found is not module
    found.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert close(found(x.contiguous(memory_format=torch.channels_last))[0].detach(), expected, 1e-5)


class _Heavy(torch.nn.Module):
    """Has no memory left for its pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 3)
        self.head.register_forward_pre_hook(self.take)

    @staticmethod
    def take(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.head(x)]


def test_running_out_of_memory_does_not_decide_the_comparison() -> None:
    """The error is raised, so that memory can be freed, and the weights do not change."""
    from fedhen.engines.cuda.fusing import fuse

    module = _Heavy()
    before = module.head.weight.detach().clone()
    with pytest.raises(torch.OutOfMemoryError):
        fuse(module, torch.ones(2, 3), "heavy")
    assert torch.equal(module.head.weight, before)


def test_a_module_that_tracing_misreads_stays_as_it_is() -> None:
    """torch.fx treats an in-place sum as a new tensor, which changes what later readers get: the check finds it."""
    from fedhen.engines.cuda.fusing import fuse

    module = _Tricky(in_place=True).to(WHERE)
    with pytest.warns(UserWarning, match="tier 'in place' .* computes something else") as said:
        assert all(fuse(module, torch.randn(2, 8, 4, 4, device=WHERE), "in place") is module for _ in range(3))
    assert len(said) == 1


def test_a_layer_with_hooks_is_left_alone() -> None:
    """The weight of such a layer is made anew in every pass; reading it from outside would be reading the last one."""
    from fedhen.engines.cuda.fusing import rewrite
    from fedhen.engines.cuda.layout import make_layout

    layer = torch.nn.utils.weight_norm(torch.nn.Conv2d(8, 8, 3, padding=1, bias=False)).to(WHERE)
    module = torch.nn.Sequential(layer)
    assert "conv3x3" not in str(rewrite(module).graph)
    assert make_layout(module, dict(module.named_parameters()), lower=True).low_size == 0
