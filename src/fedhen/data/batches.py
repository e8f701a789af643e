"""Plans which examples a device visits in which order, and makes its batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedhen.data.augmentation import AUGMENTATIONS, Coins, Draws, draw
from fedhen.data.dataset import Data, Index
from fedhen.data.inputs import Inputs, map_tensors
from fedhen.seeds import DeviceStreams


@dataclass(frozen=True)
class Visits:
    """All visits of one device in one round, in order; batches end at `ends`."""

    examples: Index
    ends: Index
    draws: Draws

    def batches(self) -> Iterator[slice]:
        """Yields the visits of each batch, in order."""
        for begin, end in zip([0, *self.ends[:-1]], self.ends, strict=True):
            yield slice(int(begin), int(end))

    def only(self, counted: Coins) -> Visits:
        """Leaves out the batches none of whose examples counts."""
        kept = [part for part in self.batches() if counted[self.examples[part]].any()]
        if len(kept) == len(self.ends):
            return self
        places = np.concatenate([np.arange(0), *(np.arange(part.start, part.stop) for part in kept)])
        ends = np.cumsum([part.stop - part.start for part in kept], dtype=np.int64)
        return Visits(self.examples[places], ends, self.draws[places])


def plan_visits(
    shard: Index,
    epochs: int,
    batch_size: int,
    drop_last: bool,
    streams: DeviceStreams,
    max_steps: int = 0,
    purpose: tuple[str | int, ...] = (),
) -> Visits:
    """Plans a new order for every epoch, of at most `max_steps` batches in all, if it is not 0.

    `streams` are those of the device in the round, and `purpose` is why it trains if that is not the round: the draws
    depend on nothing else.
    """
    order = streams.stream("order", *purpose)
    per_epoch = len(shard) - len(shard) % batch_size if drop_last and len(shard) >= batch_size else len(shard)
    examples = np.concatenate([order.permutation(shard)[:per_epoch] for _ in range(epochs)])
    ends = np.minimum(np.arange(batch_size, per_epoch + batch_size, batch_size), per_epoch)
    all_ends = np.concatenate([ends + per_epoch * epoch for epoch in range(epochs)])
    if max_steps:
        all_ends = all_ends[:max_steps]
        examples = examples[: all_ends[-1]]
    return Visits(
        examples=examples,
        ends=all_ends,
        draws=draw(streams.stream("augmentation", *purpose), len(examples)),
    )


def make_batch(data: Data, plan: Visits, part: slice, augmentation: str) -> tuple[Inputs, Tensor]:
    """Returns the inputs and targets of one batch, on the device that holds the data."""
    index = torch.from_numpy(plan.examples[part]).to(data.device)
    augment = AUGMENTATIONS[augmentation]
    return map_tensors(data.inputs(index), lambda x: augment(x, plan.draws[part])), data.y[index]
