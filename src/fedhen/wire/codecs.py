"""Codecs of an update: how the change of a device's weights is written in fewer bytes.

A codec works on all floating weights of a device as one vector. What it writes is a few named tensors, whose types and
shapes depend on the weights' shapes alone. So every update of a tier has the same number of bytes, and a server knows
what to expect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedhen.params import Weights
from fedhen.wire.layout import Layout

Draw = Callable[[int], Tensor]
"""Number -> as many random numbers of [0, 1). They follow from the device's streams of the round."""
VALUES, SCALES, INDICES = "coded/values", "coded/scales", "coded/indices"
STEPS = 127
"""Steps of an 8-bit number on either side of zero."""


class Coded(NamedTuple):
    """A change as it is sent, and what the device keeps of it."""

    tensors: Weights
    rest: Tensor | None = None
    """What was not sent, which the device adds to its next change; None if nothing is kept."""


class Codec(Protocol):
    """How a change is written and read.

    `Whole` is the simplest example. A change that is not finite must be read as one that is not finite, so that the
    server leaves the device out.
    """

    @property
    def keeps_rest(self) -> bool:
        """Whether devices keep what was not sent."""
        ...

    def encode(self, change: Tensor, layout: Layout, draw: Draw) -> Coded:
        """Writes a change.

        Args:
            change: What the device's weights have changed by, with the rest of its last round, as one vector.
            layout: Where the weights are in the vector.
            draw: Random numbers for rounding.

        Returns:
            The tensors that are sent, and the rest.
        """
        ...

    def decode(self, tensors: Weights, layout: Layout) -> Tensor:
        """Returns the change that was written, as a vector of the layout's type."""
        ...

    def like(self, layout: Layout) -> Weights:
        """Returns tensors with the names, types and shapes of what `encode` writes. Their values are not used."""
        ...

    def find_fault(self, tensors: Weights, layout: Layout) -> str:
        """Returns why tensors of the right types and shapes cannot be decoded, or "" if they can."""
        ...


@dataclass(frozen=True)
class Whole:
    """Sends the change as numbers of a type: by default of the weights' own, or rounded to bfloat16."""

    type: torch.dtype | None = None
    keeps_rest: bool = False

    def encode(self, change: Tensor, layout: Layout, draw: Draw) -> Coded:
        return Coded({VALUES: change.to(self.type or layout.type)})

    def decode(self, tensors: Weights, layout: Layout) -> Tensor:
        return tensors[VALUES].to(layout.type)

    def like(self, layout: Layout) -> Weights:
        return {VALUES: layout.empty(layout.number, self.type or layout.type)}

    def find_fault(self, tensors: Weights, layout: Layout) -> str:
        return ""


@dataclass(frozen=True)
class Int8:
    """Sends whole numbers from -127 to 127 and a scale for each tensor, the largest change divided by 127.

    A number between two steps is rounded up with the probability of its distance from the lower one. The error is below
    a step, and zero on average (QSGD: Alistarh et al. 2017).
    """

    keeps_rest: bool = False

    def encode(self, change: Tensor, layout: Layout, draw: Draw) -> Coded:
        scales = torch.stack([part.abs().max() if len(part) else part.sum() for part in layout.split(change)]) / STEPS
        each = layout.spread(scales)
        steps = torch.where(each > 0, change / each, torch.zeros_like(change))
        # Half precision has too few digits for a sum of up to 127 and a random share of 1.
        steps = steps.to(torch.promote_types(steps.dtype, torch.float32))
        values = (steps + draw(layout.number).to(steps)).floor_().clamp_(-STEPS, STEPS)
        # A scale that is not finite makes the change so, whatever the values are.
        return Coded({VALUES: values.nan_to_num_().to(torch.int8), SCALES: scales})

    def decode(self, tensors: Weights, layout: Layout) -> Tensor:
        return tensors[VALUES].to(layout.type) * layout.spread(tensors[SCALES])

    def like(self, layout: Layout) -> Weights:
        values = layout.empty(layout.number, torch.int8)
        return {VALUES: values, SCALES: layout.empty(len(layout.sizes), layout.type)}

    def find_fault(self, tensors: Weights, layout: Layout) -> str:
        if bool((tensors[VALUES] < -STEPS).any()):
            return f"a value of its update is below -{STEPS}"
        return "a scale of its update is negative" if bool((tensors[SCALES] < 0).any()) else ""


@dataclass(frozen=True)
class TopK:
    """Sends the largest changes of each group of weights with their places, and keeps the rest on the device.

    The rest is added to the device's next change, so that no change is lost (error feedback: Stich et al. 2018). Of
    equal sizes the first places are sent.
    """

    keep: float
    """Share of each group that is sent."""
    keeps_rest: bool = True

    def encode(self, change: Tensor, layout: Layout, draw: Draw) -> Coded:
        chosen = [
            group[find_largest(change[group], count)]
            for group, count in zip(layout.groups, self.counts(layout), strict=True)
        ]
        places = torch.cat(chosen)
        values, rest = change[places], change.clone()
        rest[places] = 0
        if not bool(change.isfinite().all()):
            values = torch.full_like(values, torch.nan)
        return Coded({VALUES: values, INDICES: places.to(torch.int32)}, rest)

    def decode(self, tensors: Weights, layout: Layout) -> Tensor:
        change = torch.zeros(layout.number, dtype=layout.type, device=layout.device)
        change[tensors[INDICES].long()] = tensors[VALUES]
        return change

    def like(self, layout: Layout) -> Weights:
        number = sum(self.counts(layout))
        return {VALUES: layout.empty(number, layout.type), INDICES: layout.empty(number, torch.int32)}

    def find_fault(self, tensors: Weights, layout: Layout) -> str:
        parts = torch.split(tensors[INDICES].long(), self.counts(layout))
        for group, places in zip(layout.groups, parts, strict=True):
            if not bool((places[1:] > places[:-1]).all()) or not bool(torch.isin(places, group).all()):
                return "the places of its update are not in order, or not those of weights"
        return ""

    def counts(self, layout: Layout) -> list[int]:
        """Returns how many changes of each group are sent, at least one."""
        return [max(1, round(self.keep * len(group))) for group in layout.groups]


def find_largest(change: Tensor, count: int) -> Tensor:
    """Returns the places of the largest absolute values in rising order; of equal ones the first."""
    size = change.abs()
    least = size.topk(count).values[-1]
    above = (size > least).nonzero().flatten()
    equal = (size == least).nonzero().flatten()[: count - len(above)]
    return torch.cat([above, equal]).sort().values
