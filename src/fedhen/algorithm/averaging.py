"""How updates enter the average of a round, and how the average is finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from fedhen.algorithm.updates import Update
from fedhen.config.training_settings import ServerConfig
from fedhen.params import NO_ROWS, Average, TierModels, Weights


class Contribution(NamedTuple):
    """What is added to the average for an update."""

    weights: Weights
    weight: float = 1.0
    rows: Mapping[str, Tensor] = NO_ROWS
    """For tensors with a row for each class: a mask of the rows that count."""


class Averaging(Protocol):
    """How one round is averaged: the seam of bounds and of differential privacy.

    `ByHolder` is the paper's.
    """

    def enter(self, update: Update) -> Contribution:
        """Returns what an update adds to the average of its pool."""
        ...

    def finish(self, average: Average, before: Weights, pool: tuple[str, ...]) -> Average:
        """Returns the average that the server steps to.

        Args:
            average: The sums and counts of all contributions to the pool, of all ranks.
            before: The pool's weights before the round.
            pool: The tiers of the pool.
        """
        ...


BeginAveraging = Callable[[int, TierModels, Sequence[Update]], Averaging]
"""(round, what was sent to each tier, the updates on this rank) -> how that round is averaged."""


@dataclass(frozen=True)
class ByHolder:
    """Averages every element over the active devices that hold it (Alg. 1, lines 17-22)."""

    rule: ServerConfig

    def enter(self, update: Update) -> Contribution:
        weight = update.samples if self.rule.weighting == "samples" else 1.0
        return Contribution(select_contribution(update, self.rule), weight, update.rows)

    def finish(self, average: Average, before: Weights, pool: tuple[str, ...]) -> Average:
        return average


def select_contribution(update: Update, rule: ServerConfig) -> Weights:
    """Returns the weights of an update that count in the average."""
    if rule.untrained_weights == "average":
        return update.weights
    return {name: tensor for name, tensor in update.weights.items() if name in update.trained}
