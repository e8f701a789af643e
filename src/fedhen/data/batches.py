"""Which examples a device visits in which order, and how each visit is cropped and flipped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedhen import seeds
from fedhen.data.dataset import Data, Index

PADDING = 4
Coins = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True)
class Visits:
    """All visits of one device in one round, one after the other; batches end at `ends`."""

    examples: Index
    ends: Index
    corners: Index
    """(visits, 2): row and column of the crop in the padded image."""
    flips: Coins
    crops: Coins
    """For those who crop only half of the time."""

    def batches(self) -> Iterator[slice]:
        """The visits of each batch, in order."""
        for begin, end in zip([0, *self.ends[:-1]], self.ends, strict=True):
            yield slice(int(begin), int(end))


def plan_visits(shard: Index, epochs: int, batch_size: int, drop_last: bool, address: tuple[int, int, int]) -> Visits:
    """Every epoch in a new order. `address` is (seed, round, device): the draws depend on nothing else."""
    seed, round_number, device = address
    order = seeds.stream(seed, "order", round_number, device)
    per_epoch = len(shard) - len(shard) % batch_size if drop_last and len(shard) >= batch_size else len(shard)
    examples = np.concatenate([order.permutation(shard)[:per_epoch] for _ in range(epochs)])
    ends = np.minimum(np.arange(batch_size, per_epoch + batch_size, batch_size), per_epoch)
    augment = seeds.stream(seed, "augmentation", round_number, device)
    return Visits(
        examples=examples,
        ends=np.concatenate([ends + per_epoch * epoch for epoch in range(epochs)]),
        corners=augment.integers(0, 2 * PADDING + 1, (len(examples), 2)),
        flips=augment.random(len(examples)) < 0.5,
        crops=augment.random(len(examples)) < 0.5,
    )


def make_batch(data: Data, plan: Visits, part: slice, augmentation: str) -> tuple[Tensor, Tensor]:
    """The inputs and labels of one batch, made where the data lies."""
    index = torch.from_numpy(plan.examples[part]).to(data.x.device)
    x, y = data.inputs(data.x[index]), data.y[index]
    return (AUGMENTATIONS[augmentation](x, plan, part), y)


def as_it_is(x: Tensor, plan: Visits, part: slice) -> Tensor:
    """No augmentation."""
    return x


def crop_and_flip(x: Tensor, plan: Visits, part: slice) -> Tensor:
    """A random crop of the normalised image padded with PADDING zeros, flipped half of the time."""
    return _windows(x, plan.corners[part], plan.flips[part])


def half_crop_and_flip(x: Tensor, plan: Visits, part: slice) -> Tensor:
    """Cropped half of the time too."""
    return _windows(x, np.where(plan.crops[part, None], plan.corners[part], PADDING), plan.flips[part])


def _windows(x: Tensor, corners: Index, flips: Coins) -> Tensor:
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


AUGMENTATIONS = {"none": as_it_is, "crop-flip": crop_and_flip, "half-crop-flip": half_crop_and_flip}
