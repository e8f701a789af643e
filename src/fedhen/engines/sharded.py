"""Divides a round's devices among ranks. Each rank trains its share with its own engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedhen.algorithm.rounds import Devices, Sent
from fedhen.algorithm.updates import Reply
from fedhen.devices.population import Population
from fedhen.devices.state_store import StateStore
from fedhen.distributed.communicator import Ranks
from fedhen.params import pack


@dataclass
class ShardedDevices:
    """The devices of all ranks. Every rank computes the same division and trains its share."""

    devices: Devices
    population: Population
    memory: StateStore
    """Device -> what it keeps between its rounds, for the devices that trained last on this rank."""
    ranks: Ranks

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Moves each device's state to the rank that trains it, then trains this rank's share."""
        owners = self.find_owners(active)
        shares = assign_to_ranks({device: self.population.cost(device) for device in active}, self.ranks.number, owners)
        for to, share in enumerate(shares):
            for device in share:
                if owners.get(device, to) != to:
                    self.move_state(device, owners[device], to, sent)
        yield from self.devices.train(round_number, sent, shares[self.ranks.rank])

    def find_owners(self, active: Sequence[int]) -> dict[int, int]:
        """Returns active device -> the rank that has its state."""
        if not self.population.keeps_state:
            return {}
        kept = self.ranks.gather([device for device in active if device in self.memory])
        return {device: rank for rank, devices in enumerate(kept) for device in devices}

    def move_state(self, device: int, source: int, to: int, sent: Sent) -> None:
        """Moves a device's state. All ranks call this in the same order, which avoids deadlocks."""
        tier = self.population.tier_of[device]
        if self.ranks.rank == source:
            self.ranks.carry(source, to, self.memory.vector(device))
            del self.memory[device]
        elif self.ranks.rank == to:
            like = self.population.state_like(tier, sent.models[tier])
            self.memory.put(device, self.ranks.carry(source, to, pack(like)), like)


def assign_to_ranks(costs: Mapping[int, int], number: int, owners: Mapping[int, int]) -> list[list[int]]:
    """Returns each rank's devices, in rising order.

    The most expensive device goes first, each to the least loaded rank. Among equally loaded ranks, the owner of the
    device's state comes first, then the lowest rank.
    """
    loads, shares = [0] * number, [[] for _ in range(number)]  # type: tuple[list[int], list[list[int]]]
    for device in sorted(costs, key=lambda device: (-costs[device], device)):
        rank = min(range(number), key=lambda rank: (loads[rank], rank != owners.get(device), rank))
        loads[rank] += costs[device]
        shares[rank].append(device)
    return [sorted(share) for share in shares]
