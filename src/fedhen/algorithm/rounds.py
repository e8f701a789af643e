"""Alg. 1: sample, train the active devices, leave out failed and non-finite ones, merge. One loop for all methods."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

from fedhen.algorithm.failures import FailureWatch
from fedhen.algorithm.local_variants import PLAIN, LocalVariant
from fedhen.algorithm.merging import Memories, merge
from fedhen.algorithm.methods import Method
from fedhen.algorithm.sampling import NO_LOSSES, Activate
from fedhen.algorithm.updates import Failure, Reply, Update
from fedhen.config.settings import ServerConfig
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.params import TierModels, is_finite


class Devices(Protocol):
    """Whoever trains the active devices: the loop never knows who."""

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Alg. 1, lines 5-15: send each active device its tier's model, and yield what becomes of it, in any order."""
        ...


@dataclass(frozen=True)
class Sent:
    """What the server sends to the devices of each tier."""

    models: TierModels
    mean: TierModels
    """The mean of the devices' memories, where the local variant has one."""


@dataclass(frozen=True)
class Round:
    """What a round did."""

    number: int
    active: list[int]
    updates: list[Update]
    """The finite ones that were trained by this rank, which entered the merge, in the order of the devices."""
    losses: dict[int, float]
    """The mean local loss of every device that entered the merge, in the order of the devices."""
    dropped: list[int]
    """Active devices that were left out because a weight was not finite."""
    failed: dict[int, str]
    """Active devices that were left out because their training raised, each with its error in one line."""
    late: list[int]
    """Active devices that had not answered when the round ended."""
    server: TierModels
    memories: Memories

    @property
    def loss(self) -> float | None:
        """The mean of the devices' mean local losses; none where no device came back, or where it is not finite."""
        mean = sum(self.losses.values()) / len(self.losses) if self.losses else math.nan
        return mean if math.isfinite(mean) else None


@dataclass(frozen=True)
class Rules:
    """How the rounds are played."""

    method: Method
    activate: Activate
    server: ServerConfig
    local: LocalVariant = PLAIN
    ranks: Ranks = ALONE
    """Who plays along; the loop need not know how many."""


def play_rounds(
    server: TierModels,
    memories: Memories,
    devices: Devices,
    rules: Rules,
    numbers: Sequence[int],
    losses: Mapping[int, float] = NO_LOSSES,
) -> Iterator[Round]:
    """Run these rounds one by one, from the given server models and the losses that devices reported last."""
    losses = dict(losses)
    ranks, pools = rules.ranks, rules.method.pools
    watch = FailureWatch(warns=not ranks.rank)
    for number in numbers:
        # Only now: the last round that was in vain is recorded too.
        watch.raise_if_none_returned()
        active = ranks.first(partial(rules.activate, number, losses))
        sent = Sent(memories.starting_models(server, rules.local), memories.mean)
        # In the order of the devices, so that it does not matter in which order they come back.
        replies = sorted(devices.train(number, sent, active), key=lambda reply: reply.device)
        updates = [reply for reply in replies if isinstance(reply, Update)]
        failures = [(reply.device, reply.error, reply.late) for reply in replies if isinstance(reply, Failure)]
        # The paper, "Hyperparameters": a device with NaN weights is ignored, only for that round.
        good = {update.device: is_finite(update.weights) for update in updates}
        kept = [update for update in updates if good[update.device]]
        own = [(update.device, good[update.device], update.loss) for update in updates]
        said, faults = zip(*ranks.gather((own, failures)), strict=True)
        everyone = sorted(chain.from_iterable(said))
        missing = sorted(chain.from_iterable(faults))
        failed = {device: error for device, error, late in missing if not late}
        late = {device: error for device, error, late in missing if late}
        dropped = [device for device, fine, _ in everyone if not fine]
        now = {device: loss for device, fine, loss in everyone if fine}
        server = merge(server, kept, pools, rules.server, ranks=ranks)
        memories = memories.update(kept, pools, rules.local, ranks=ranks)
        losses.update(now)
        watch.observe(number, active, now, failed, late)
        done = Round(number, active, kept, now, dropped, failed, [*late], server, memories)
        # What the active devices sent back need not outlive the round: the next one brings as much.
        del replies, updates, kept
        yield done
        del done
