"""Random crops and flips of images, computed where the images are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhen.data.dataset import Index

PADDING = 4
Coins = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Draws:
    """What chance decides for each image; an augmentation uses what it needs."""

    corners: Index
    """(images, 2): row and column of the crop in the padded image."""
    flips: Coins
    crops: Coins
    """Whether to crop, for augmentations that crop half of the time."""

    def __getitem__(self, part: slice | Index) -> Draws:
        return Draws(self.corners[part], self.flips[part], self.crops[part])


def draw(rng: np.random.Generator, images: int) -> Draws:
    """Draws for that many images."""
    return Draws(
        corners=rng.integers(0, 2 * PADDING + 1, (images, 2)),
        flips=rng.random(images) < 0.5,
        crops=rng.random(images) < 0.5,
    )


def crop_and_flip(x: Tensor, draws: Draws) -> Tensor:
    """Crops each normalised image from itself padded with PADDING zeros, and flips half of them."""
    return _cut_windows(x, draws.corners, draws.flips)


def half_crop_and_flip(x: Tensor, draws: Draws) -> Tensor:
    """Crops half of the images and flips half of them."""
    return _cut_windows(x, np.where(draws.crops[:, None], draws.corners, PADDING), draws.flips)


def _cut_windows(x: Tensor, corners: Index, flips: Coins) -> Tensor:
    height, width = x.shape[-2:]
    padded = torch.nn.functional.pad(x, (PADDING,) * 4)
    top, left = torch.from_numpy(corners).to(x.device).T
    flip = torch.from_numpy(flips).to(x.device)
    rows = top[:, None] + torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device)
    columns = left[:, None] + torch.where(flip[:, None], columns.flip(0), columns)
    image = torch.arange(len(x), device=x.device)[:, None, None, None]
    channel = torch.arange(x.shape[1], device=x.device)[None, :, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


AUGMENTATIONS: dict[str, Callable[[Tensor, Draws], Tensor]] = {
    "none": lambda x, draws: x,
    "crop-flip": crop_and_flip,
    "half-crop-flip": half_crop_and_flip,
}
