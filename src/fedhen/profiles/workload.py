"""What a round asks of the devices, whatever their class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Workload:
    """The operations of an example in each tier, and the examples of each device."""

    operations: Mapping[str, int] = field(default_factory=dict)
    """Tier -> operations of one example in its model; without the tiers for which they cannot be counted."""
    training_operations: Mapping[str, int] = field(default_factory=dict)
    """Tier -> operations of one example in training: forward and backward."""
    examples: Sequence[int] = ()
    """The number of training examples of each device; empty if the run bounds or hides what a device tells."""
    tier_examples: Mapping[str, int] = field(default_factory=dict)
    """Tier -> their sum, in runs with bounded updates, whose records say nothing of a single device's data."""

    def count_examples(self, tier_of: Sequence[str]) -> list[int]:
        """Returns the number of training examples of each device; with bounded updates the mean of its tier."""
        if self.examples:
            return list(self.examples)
        return [round(self.tier_examples[tier] / tier_of.count(tier)) for tier in tier_of]
