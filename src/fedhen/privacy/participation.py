"""Who may take part in a round, if a device takes part at most once in any b rounds in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedhen import seeds
from fedhen.algorithm.sampling import Activate
from fedhen.config.settings import Config


def deal_turns(seed: int, tier_of: Sequence[str], separation: int) -> list[frozenset[int]]:
    """Deals the devices of each tier into b groups, drawn at random. Group t mod b may take part in round t."""
    turns: list[list[int]] = [[] for _ in range(separation)]
    stream, place = seeds.stream(seed, "turns"), 0
    for tier in dict.fromkeys(tier_of):
        members = [device for device, own in enumerate(tier_of) if own == tier]
        for device in stream.permutation(members).tolist():
            turns[place % separation].append(device)
            place += 1
    return [frozenset(turn) for turn in turns]


def make_separated_sampler(config: Config, tier_of: Sequence[str]) -> Activate:
    """Makes a sampler that draws the active devices of a round from the group whose turn it is."""
    turns = deal_turns(config.seed, tier_of, config.privacy.separation)

    def active(number: int, losses: Mapping[int, float]) -> list[int]:
        stream, turn = seeds.stream(config.seed, "active devices", number), sorted(turns[number % len(turns)])
        return sorted(int(d) for d in stream.choice(turn, min(len(turn), config.devices.active), replace=False))

    return active
