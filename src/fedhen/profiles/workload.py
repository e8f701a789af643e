"""What a round asks of the devices, whatever their class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from fedhen.fileio.untrusted import MOST
from fedhen.profiles.device_round import count_visits


class LocalSteps(Protocol):
    """The settings that say how many examples a device visits in a round."""

    @property
    def epochs(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def last_batch(self) -> str: ...


@dataclass(frozen=True)
class TrainingPhase:
    """Steps of a round, and what they compute."""

    operations: dict[str, Annotated[int, 0, MOST]]
    """Tier -> operations of one example in these steps."""
    epochs: Annotated[int, 1, MOST]
    max_steps: Annotated[int, 0, MOST] = 0
    """The largest number of batches; 0: no limit."""
    batches: Annotated[int, 1, MOST] = 1
    """The number of batches that a step takes."""


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
    phases: Sequence[TrainingPhase] = ()
    """What a device does in a round; empty if it is `training.epochs` with `training_operations`."""

    def count_examples(self, tier_of: Sequence[str]) -> list[int]:
        """Returns the number of training examples of each device; with bounded updates the mean of its tier."""
        if self.examples:
            return list(self.examples)
        return [round(self.tier_examples[tier] / tier_of.count(tier)) for tier in tier_of]

    def count_round(self, tier_of: Sequence[str], steps: LocalSteps) -> list[float]:
        """Returns the operations of each device's training in a round."""
        usual = TrainingPhase(dict(self.training_operations), steps.epochs, steps.max_steps)
        found = [0.0] * len(tier_of)
        for phase in self.phases or [usual]:
            for device, (number, tier) in enumerate(zip(self.count_examples(tier_of), tier_of, strict=True)):
                visits = count_visits(
                    number,
                    epochs=phase.epochs,
                    batch_size=steps.batch_size,
                    max_steps=phase.max_steps,
                    drop_last=steps.last_batch == "drop",
                    together=phase.batches,
                )
                found[device] += float(visits * phase.operations[tier])
        return found
