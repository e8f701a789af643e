"""What a mechanism must remember from one round to the next, for checkpoints: releases, the bound, and past noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedhen.fileio import untrusted
from fedhen.params import Shapes, TierModels

PART = "noise"


@dataclass(frozen=True)
class Ledger:
    """What has been spent, and what the next round's noise needs. It is replaced and never changed."""

    streams: tuple[int, ...] = ()
    """Noisy sums that were released in each stream of noise, the current one last. Without noise there is no stream."""
    bound: float = 0.0
    """S of the next round."""
    past: tuple[TierModels, ...] = ()
    """The noise of the rounds before, in steps, the last one first: pool -> weight -> noise. Secret."""
    shapes: Mapping[str, Shapes] = field(default_factory=dict)
    """Pool -> the shapes of its noise."""
    bands: int = 1
    """b: the noise of a round depends on that of b - 1 rounds before it."""

    @property
    def releases(self) -> int:
        return sum(self.streams)

    def parts(self) -> dict[str, TierModels]:
        """Returns the tensors that a checkpoint holds for it."""
        return {f"{PART}-{age}": noise for age, noise in enumerate(self.past, start=1)}

    def describe(self) -> dict[str, Any]:
        """Returns all but the tensors, as JSON represents it; empty if there is nothing to remember."""
        return {"streams": list(self.streams), "bound": self.bound, "past": len(self.past)} if self.streams else {}

    def after_loss(self, streams: Sequence[int]) -> Ledger:
        """Returns the ledger after these releases, of which it lacks some: as their noise is lost, a stream begins."""
        return replace(self, streams=(*streams, 0), past=())

    def expect(self, values: Any, played: int) -> Ledger:
        """Returns a ledger with the shapes of one that was saved after these rounds.

        Raises one of PARSE_ERRORS if the values are malformed.
        """
        if not self.streams:
            return self
        streams = tuple(untrusted.check_int(number, 0) for number in values["streams"])
        past = untrusted.check_int(values["past"], 0)
        if sum(streams) < played or past != min(streams[-1], self.bands - 1):
            raise ValueError("it has not the noise of its rounds")
        like = {pool: {n: torch.zeros(shape).double() for n, shape in of.items()} for pool, of in self.shapes.items()}
        return replace(self, streams=streams, bound=untrusted.check_number(values["bound"]), past=(like,) * past)

    def fill(self, parts: Mapping[str, TierModels]) -> Ledger:
        """Returns an expected ledger with the tensors of a checkpoint."""
        return replace(self, past=tuple(parts[f"{PART}-{age}"] for age in range(1, len(self.past) + 1)))
