"""The reply of an active device in a round: an update, or a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedhen.params import Weights


@dataclass(frozen=True)
class Update:
    """The trained weights of an active device, and what the server needs to merge them."""

    device: int
    tier: str
    weights: Weights
    """All weights that a device of the tier holds."""
    trained: frozenset[str]
    """The names of the weights that count in the average if `server.untrained_weights` is "skip"."""
    samples: int
    """The number of the device's training examples."""
    loss: float
    """The mean loss over its local steps."""
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """For tensors with a row for each class: a mask of the rows that count in the average. By default all rows do."""
    memory_change: Weights = field(default_factory=dict)
    """By how much the device's memory changed; empty if the local variant has no memory."""
    encoded: Weights = field(default_factory=dict)
    """What the device sends: its weights as they are or, with a codec, named tensors that code them."""
    omega: float = 1.0
    """ω_i = n_i·N/n: the device's share of its pool's data, 1 if all devices have the same amount."""


@dataclass(frozen=True)
class Failure:
    """An active device without a usable update: its training raised an error, or it is late."""

    device: int
    error: str
    """The reason, in one line."""
    late: bool = False
    """Whether the round ended before the device answered."""


Reply = Update | Failure
"""The reply of an active device: an engine yields one for each."""
