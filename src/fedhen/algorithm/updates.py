"""What becomes of an active device in a round: an update, or a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedhen.params import Weights


@dataclass(frozen=True)
class Update:
    """What an active device sends back: its trained weights."""

    device: int
    tier: str
    weights: Weights
    trained: frozenset[str]
    """The weights that its objective trains."""
    samples: int
    loss: float
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    """For weights whose rows are the classes: which rows count, where not all of them do."""
    memory_change: Weights = field(default_factory=dict)
    """By how much the device's memory changed, where the local variant has one."""
    omega: float = 1.0


@dataclass(frozen=True)
class Failure:
    """An active device that sends nothing back that could be used: its training raised, or it is late."""

    device: int
    error: str
    """In one line."""
    late: bool = False
    """Whether the round ended before it answered."""


Reply = Update | Failure
"""What becomes of an active device."""
