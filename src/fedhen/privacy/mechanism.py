"""The seam of bounds and of differential privacy: how a run averages its updates, and what that adds to its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedhen.algorithm.averaging import Averaging, ByHolder
from fedhen.algorithm.updates import Update
from fedhen.config.settings import ServerConfig
from fedhen.params import TierModels


@dataclass
class Mechanism:
    """Averages by holder and adds nothing: the paper's server, and the base of the other mechanisms."""

    rule: ServerConfig

    def begin(self, number: int, sent: TierModels, updates: Sequence[Update]) -> Averaging:
        """Returns how a round is averaged. The arguments are those of `BeginAveraging`."""
        return ByHolder(self.rule)

    def record(self) -> dict[str, Any]:
        """Returns what the record of the last round has beside its other keys."""
        return {}
