"""Who may take part in a round, if a device takes part at most once in any b rounds in a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedhen import seeds
from fedhen.algorithm.sampling import Activate
from fedhen.config.settings import Config


def deal_turns(root: seeds.Root, tier_of: Sequence[str], separation: int) -> list[frozenset[int]]:
    """Deals the devices of each tier into b groups, drawn at random. Group t mod b may take part in round t."""
    turns: list[list[int]] = [[] for _ in range(separation)]
    stream, place = seeds.stream(root, "turns"), 0
    for tier in dict.fromkeys(tier_of):
        members = [device for device, own in enumerate(tier_of) if own == tier]
        for device in stream.permutation(members).tolist():
            turns[place % separation].append(device)
            place += 1
    return [frozenset(turn) for turn in turns]


def make_turns(config: Config, tier_of: Sequence[str], root: seeds.Root) -> Callable[[int], frozenset[int]]:
    """Returns round -> the devices that may take part in it: all of them without a separation.

    Devices that have joined since the run began, those beyond `devices.number`, change no other device's turn.
    """
    first, separation = config.devices.number, config.privacy.separation
    turns = [set(turn) for turn in deal_turns(root, tier_of[:first], separation)]
    for device in range(first, len(tier_of)):
        turns[device % separation].add(device)
    return lambda number: frozenset(turns[number % separation])


def make_separated_sampler(config: Config, tier_of: Sequence[str], root: seeds.Root) -> Activate:
    """Makes a sampler that draws the active devices of a round from the group whose turn it is."""
    find_turn = make_turns(config, tier_of, root)

    def active(number: int, losses: Mapping[int, float]) -> list[int]:
        stream, turn = seeds.stream(root, "active devices", number), sorted(find_turn(number))
        return sorted(int(d) for d in stream.choice(turn, min(len(turn), config.devices.active), replace=False))

    return active
