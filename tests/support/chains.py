"""Models that are chains of blocks, to be cut into tiers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(2, width)


class BasicBlock(nn.Module):
    """A residual block with the names of torchvision's."""

    def __init__(self, width_in: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False), norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), norm(width)
        changes = stride != 1 or width_in != width
        self.downsample = (
            nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), norm(width)) if changes else None
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A small ResNet with the names of torchvision's, and functions between its blocks."""

    def __init__(self, classes: int = 3, norm: Norm = group_norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), norm(4)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1, norm))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2, norm))
        self.layer3 = nn.Sequential(BasicBlock(8, 8, 1, norm))
        self.layer4 = nn.Sequential(BasicBlock(8, 12, 2, norm))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 2)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


class Patches(nn.Module):
    """A chain with weights of its own: one that every tier uses, one that only the end of the model does."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.ones(4), persistent=False)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.offset
        for block in self.blocks:
            x = torch.tanh(block(F.dropout(x, 0.5, self.training)))
        return self.heads((x * self.scale)[:, 0])  # type: ignore[no-any-return]
