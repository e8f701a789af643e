"""Channels last: for which networks, by a rule over their layers, and what becomes of those that cannot bear it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedhen.hardware.precision import FULL, Precision
from fedhen.models.image_layout import apply_image_layout, is_faster_with_channels_last

BF16 = Precision("bf16", "cpu")


class Net(nn.Module):
    """Two convolutions and a norm; its last lines are a user's own."""

    def __init__(self, groups: int = 1, channels: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, channels, 3), nn.GroupNorm(2, channels), nn.ReLU())
        self.last = nn.Conv2d(channels, channels, 3, groups=groups)
        self.top = nn.Linear(channels * 16, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.last(self.body(x))
        self.seen = h.detach()
        return [self.top(h.flatten(1))]


class Viewing(Net):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.top(self.last(self.body(x)).view(len(x), -1))]


class Striding(Net):
    """Reads memory as it lies, and so computes something else where it lies otherwise."""

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.last(self.body(x))
        return [self.top(h.as_strided((len(x), h[0].numel()), (h[0].numel(), 1)))]


def test_the_rule_looks_at_layers() -> None:
    assert is_faster_with_channels_last(Net(), FULL)
    assert not is_faster_with_channels_last(nn.Linear(3, 3), FULL)
    assert not is_faster_with_channels_last(Net(groups=8), FULL)
    assert not is_faster_with_channels_last(Net(channels=8), BF16)
    assert is_faster_with_channels_last(Net(channels=32), BF16)


def test_a_network_computes_the_same_with_the_channels_last() -> None:
    torch.manual_seed(0)
    before, x = Net(), torch.randn(5, 2, 8, 8)
    after = apply_image_layout(copy.deepcopy(before), x[:2], FULL, 10)
    assert after.last.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[operator, union-attr]
    torch.testing.assert_close(after(x)[0], before(x)[0])
    assert not after.seen.is_contiguous()  # type: ignore[operator]
    again = copy.deepcopy(after)
    again(x)
    assert again.seen.is_contiguous(memory_format=torch.channels_last), "a copy has the layout too"  # type: ignore


@pytest.mark.parametrize("build", [Viewing, Striding])
def test_a_network_that_depends_on_its_layout_keeps_it(build: type[Net]) -> None:
    torch.manual_seed(0)
    before, x = build(), torch.randn(5, 2, 8, 8)
    after = apply_image_layout(copy.deepcopy(before), x[:2], FULL, 10)
    assert torch.equal(after(x)[0], before(x)[0]) and after.training
    assert all(p.is_contiguous() for p in after.parameters())


def test_inputs_that_are_not_images_keep_their_layout() -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten())
    assert apply_image_layout(module, torch.zeros(2, 5), FULL, 10) is module and not module._forward_pre_hooks
