"""The logits of a model's exits, shallowest first, each computed when it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor

Thunk = Callable[[], Tensor]


class LazyExits(Sequence[Tensor]):
    """A lazy list of logits: those that are not read are not computed.

    If nesting is by depth, one pass computes all exits and a plain list is enough. If it is by width, every nested
    network needs a separate pass, and an objective that reads only the last exit should not pay for the others.
    """

    def __init__(self, thunks: Sequence[Thunk]) -> None:
        self.thunks = list(thunks)
        self.found: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.thunks)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, place: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(place, slice):
            return LazyExits([self._thunk(k) for k in range(len(self))[place]])
        k = range(len(self))[place]
        if k not in self.found:
            self.found[k] = self.thunks[k]()
        return self.found[k]

    def _thunk(self, place: int) -> Thunk:
        return lambda: self[place]


def map_exits(logits: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
    """Returns the logits with a change that is made when they are read."""

    def thunk(place: int) -> Thunk:
        return lambda: change(logits[place])

    return LazyExits([thunk(place) for place in range(len(logits))])


def mask_logits(logits: Sequence[Tensor], present: Tensor) -> Sequence[Tensor]:
    """Returns the logits with 0 for the classes that are not present."""
    return map_exits(logits, change=lambda z: torch.where(present, z, torch.zeros_like(z)))
