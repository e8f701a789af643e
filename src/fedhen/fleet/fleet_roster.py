"""The roster of a real fleet: nodes that connect later join with the next round, and those that leave are not drawn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fedhen.algorithm.sampling import replace_absent
from fedhen.devices.population import Population
from fedhen.fleet.fleet_file import Member
from fedhen.fleet.membership import Membership
from fedhen.privacy.choose import choose_sampler
from fedhen.privacy.participation import make_turns

LOOK_SECONDS = 0.5


@dataclass
class FleetRoster:
    """Decides who the devices of a round are, and which of them are active, from who is connected."""

    population: Population
    membership: Membership
    folder: Path
    flower_run: int

    def take(self, population: Population) -> FleetRoster:
        """Takes the population as the experiment starts with it."""
        self.population = population
        return self

    def begin(self, number: int) -> Population:
        """Takes in new nodes, and saves who came and went before the round can name them."""
        if self.membership.begin_round(number, tuple(self.population.config.tiers)):
            self.membership.save(self.folder, self.flower_run)
        return self.at(number)

    def reopen(self, played: int) -> Population:
        self.membership.return_to(played)
        return self.at(played)

    def at(self, number: int) -> Population:
        """Returns the population of a round."""
        members = self.membership.members_of(max(number, 1))
        if len(members) != len(self.population.tier_of):
            tiers = [member.identity.tier for member in members]
            self.population = self.population.with_devices(tiers, count_samples(members))
        return self.population

    def draw(self, number: int, losses: Mapping[int, float]) -> list[int]:
        """The sampler: that of a simulation, with connected devices in place of those that are away."""
        self.wait_for_anyone()
        config, tier_of, root = self.population.config, self.population.tier_of, self.population.run_streams.root
        asked = replace(config.devices, active=config.devices.active + config.fleet.spare_devices)
        drawn = choose_sampler(replace(config, devices=asked), tier_of, root)(number, losses)
        turn = make_turns(config, tier_of, root)(number)
        present = [device for device in self.membership.connected_devices() if device in turn]
        return replace_absent(drawn, present, root, number)

    def wait_for_anyone(self) -> None:
        """Waits while no device is connected, for at most `fleet.wait_seconds`: the server's network may be down."""
        end = time.monotonic() + self.population.config.fleet.wait_seconds
        while not self.membership.connected_devices() and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            self.membership.update()


def count_samples(members: list[Member]) -> list[int]:
    return [member.identity.samples for member in members]
