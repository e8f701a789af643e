"""Alg. 1, the loop of all methods: sample devices, train them, leave out failed and non-finite ones, merge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

from fedhen.algorithm.averaging import BeginAveraging
from fedhen.algorithm.failures import FailureWatch
from fedhen.algorithm.local_variants import PLAIN, LocalVariant
from fedhen.algorithm.merging import Memories, merge
from fedhen.algorithm.methods import Method
from fedhen.algorithm.sampling import NO_LOSSES, Activate
from fedhen.algorithm.server_optimizers import NO_MOMENTS, TAKE_AVERAGE, ServerOptimizer
from fedhen.algorithm.updates import Failure, Reply, Update
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.params import TierModels, is_finite


class Devices(Protocol):
    """The seam between the loop and an engine: the devices of a run, which the engine trains.

    The loop does not depend on where devices train: in this process, in workers, on a GPU, on other machines.
    An engine that trains one device after the other:

        class OneByOne:
            def train(self, round_number, sent, active):
                for device in active:
                    try:
                        yield train_device(device, sent.models[tier_of[device]])  # an Update
                    except Exception as error:
                        yield Failure(device, describe_device_error(error))
    """

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Trains the active devices of a round (Alg. 1, lines 5-15).

        Args:
            round_number: The round, from 1. With the seed and the device it determines all random choices.
            sent: What the server sends to the devices of each tier. Engines do not change these tensors.
            active: The devices to train, in rising order.

        Yields:
            One reply for each active device, in any order. A device whose training raises is a Failure; an error that
            concerns the whole run, such as a FedhenError, is raised.
        """
        ...


@dataclass(frozen=True)
class Sent:
    """What the server sends to the devices of each tier."""

    models: TierModels
    """The weights that training starts from."""
    mean: TierModels
    """The mean of the devices' memories; empty if the local variant has no memory."""


@dataclass(frozen=True)
class Round:
    """A round that has been played, with the state of the server after it."""

    number: int
    active: list[int]
    updates: list[Update]
    """The updates that were merged, of the devices that this rank trained, ordered by device."""
    losses: dict[int, float]
    """Device -> mean local loss, for all devices whose updates were merged."""
    dropped: list[int]
    """Active devices that were left out because a weight was not finite."""
    failed: dict[int, str]
    """Active devices that were left out because their training raised, each with its error in one line."""
    late: list[int]
    """Active devices that had not answered when the round ended."""
    server: TierModels
    memories: Memories
    moments: TierModels
    """Of the server's optimiser."""

    @property
    def loss(self) -> float | None:
        """The mean over the devices of their losses, or None if there are none or it is not finite."""
        mean = sum(self.losses.values()) / len(self.losses) if self.losses else math.nan
        return mean if math.isfinite(mean) else None


@dataclass(frozen=True)
class Rules:
    """What a run does in every round."""

    method: Method
    activate: Activate
    averaging: BeginAveraging
    """How a round's updates are averaged."""
    local: LocalVariant = PLAIN
    optimizer: ServerOptimizer = TAKE_AVERAGE
    """What the server makes of the average."""
    ranks: Ranks = ALONE
    """The processes that play the run together."""
    begin: Callable[[int, Memories], Memories] = lambda number, memories: memories
    """(round, mean of the memories) -> the mean with those of devices that join before the round."""


def play_rounds(
    server: TierModels,
    memories: Memories,
    devices: Devices,
    rules: Rules,
    numbers: Sequence[int],
    losses: Mapping[int, float] = NO_LOSSES,
    moments: TierModels = NO_MOMENTS,
) -> Iterator[Round]:
    """Plays rounds one by one (Alg. 1).

    Args:
        server: The models to start from, by tier.
        memories: The mean of the devices' memories to start from.
        devices: The engine that trains the devices.
        rules: The method, the sampler, and how the server averages.
        numbers: The rounds to play, in rising order.
        losses: Device -> the loss that it reported last, if earlier rounds were played.
        moments: The moments of the server's optimiser to start from, if it has any.

    Yields:
        Each round after its merge.

    Raises:
        FedhenError: No device has returned for several rounds in a row.
    """
    losses = dict(losses)
    ranks, pools = rules.ranks, rules.method.pools
    watch = FailureWatch(warns=not ranks.rank)
    for number in numbers:
        # At the start of the next round, so that the caller has recorded the last empty one.
        watch.raise_if_none_returned()
        memories = rules.begin(number, memories)
        active = ranks.first(partial(rules.activate, number, losses))
        sent = Sent(memories.starting_models(server, rules.local), memories.mean)
        result = sort_replies(devices.train(number, sent, active), ranks)
        averaging = rules.averaging(number, sent.models, result.updates)
        server, moments = merge(server, result.updates, pools, averaging, rules.optimizer, moments, ranks=ranks)
        memories = memories.update(result.updates, pools, rules.local, ranks=ranks)
        losses.update(result.losses)
        watch.observe(number, active, result.losses, result.failed, result.late)
        yield Round(
            number,
            active,
            result.updates,
            result.losses,
            result.dropped,
            result.failed,
            late=[*result.late],
            server=server,
            memories=memories,
            moments=moments,
        )
        # Frees the updates before the next round brings as many.
        del result


class SortedReplies(NamedTuple):
    """A round's replies, as in `Round`."""

    updates: list[Update]
    losses: dict[int, float]
    dropped: list[int]
    failed: dict[int, str]
    late: dict[int, str]


def sort_replies(replies: Iterable[Reply], ranks: Ranks) -> SortedReplies:
    """Separates the updates to merge from the devices to leave out.

    Updates stay on the rank that trained them; all else is gathered from all ranks.
    """
    # By device, so that the order in which devices reply does not matter.
    in_order = sorted(replies, key=lambda reply: reply.device)
    updates = [reply for reply in in_order if isinstance(reply, Update)]
    # The paper, "Hyperparameters": a device with NaN weights is ignored in that round.
    finite = [is_finite(update.weights) for update in updates]
    trained = [(update.device, good, update.loss) for update, good in zip(updates, finite, strict=True)]
    failures = [(reply.device, reply.error, reply.late) for reply in in_order if isinstance(reply, Failure)]
    trained_by_rank, failures_by_rank = zip(*ranks.gather((trained, failures)), strict=True)
    all_trained = sorted(chain.from_iterable(trained_by_rank))
    all_failures = sorted(chain.from_iterable(failures_by_rank))
    return SortedReplies(
        updates=[update for update, good in zip(updates, finite, strict=True) if good],
        losses={device: loss for device, good, loss in all_trained if good},
        dropped=[device for device, good, _ in all_trained if not good],
        failed={device: error for device, error, late in all_failures if not late},
        late={device: error for device, error, late in all_failures if late},
    )
