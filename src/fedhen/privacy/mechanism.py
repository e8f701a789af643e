"""The seam of bounds and of differential privacy: how a run averages its updates, and what that adds to its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedhen.algorithm.averaging import Averaging, ByHolder
from fedhen.algorithm.updates import Update
from fedhen.config.training_settings import ServerConfig
from fedhen.params import TierModels
from fedhen.privacy.ledger import Ledger


@dataclass
class Mechanism:
    """Averages by holder and adds nothing: the paper's server, and the base of the other mechanisms."""

    rule: ServerConfig
    ledger: Ledger = Ledger()
    """What is remembered after the last round. It belongs into checkpoints."""

    def begin(self, number: int, sent: TierModels, updates: Sequence[Update]) -> Averaging:
        """Returns how a round is averaged. The arguments are those of `BeginAveraging`."""
        return ByHolder(self.rule)

    def publish(self, record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the record of the last round, and what of it only the server may see; empty if there is nothing."""
        return dict(record), {}

    @property
    def ending(self) -> str:
        """Why no further round may be played, or "" if it may."""
        return ""

    @property
    def spent(self) -> Sequence[int]:
        """What must be on the disk before anybody sees the last round; empty if it follows from the records."""
        return ()

    def restore(self, ledger: Ledger) -> None:
        """Continues from the ledger of a checkpoint."""
        self.ledger = ledger

    def recall(self, spent: Sequence[int]) -> None:
        """Takes account of what `spent` said last, before the run was interrupted."""
