"""Which devices a run has: the seam of fleets, whose devices join while it is played."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fedhen.devices.population import Population


class Roster(Protocol):
    """Decides who joins. Devices are numbered in the order in which they join, and stay devices of the run.

    A device that leaves is away: it is not drawn until it returns, and everything else is as if it were not drawn by
    chance. Its memory and its last model count as before, since what a mean over all devices means does not depend on
    who was drawn, and since nobody but the device could subtract its memory.

    So the population of a round is a prefix of the last one's, and these follow from it: who can be drawn, ω of every
    device, how many train a weight (`Memories.admit`), and how many count in the all-devices average.
    """

    def begin(self, number: int) -> Population:
        """Returns the population of a round that begins, with the devices that have joined before it."""
        ...

    def reopen(self, played: int) -> Population:
        """Returns the population of a round that was played before, after which the run resumes."""
        ...


@dataclass(frozen=True)
class ConstantRoster:
    """All devices are there before the first round, as in a simulation."""

    population: Population

    def begin(self, number: int) -> Population:
        return self.population

    def reopen(self, played: int) -> Population:
        return self.population
