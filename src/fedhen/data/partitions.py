"""Splits of the training data over the devices. Each deals every example exactly once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedhen import seeds
from fedhen.config.data_settings import SplitConfig
from fedhen.data.dataset import Data, Index
from fedhen.data.inputs import take
from fedhen.errors import DataError

TRIES = 100


def iid(labels: Index, devices: int, rng: np.random.Generator) -> list[Index]:
    """Cuts one random permutation into slices whose sizes differ by at most 1."""
    return _sorted(np.array_split(rng.permutation(len(labels)), devices))


def dirichlet(labels: Index, devices: int, rng: np.random.Generator, alpha: float) -> list[Index]:
    """Gives every device the same quota, within 1, and a class prior ~ Dirichlet(alpha).

    Examples are dealt one by one to a random device with quota left. The class is drawn from the device's prior over
    the classes that still have examples, or in proportion to these examples if that prior is 0.
    """
    classes = int(labels.max()) + 1
    piles = [list(rng.permutation(np.flatnonzero(labels == c))) for c in range(classes)]
    left = np.array([len(pile) for pile in piles])
    prior = rng.dirichlet(np.full(classes, alpha), devices)
    cumulative = np.cumsum(prior * (left > 0), axis=1)
    quota = np.full(devices, len(labels) // devices)
    quota[: len(labels) % devices] += 1
    open_devices = [d for d in range(devices) if quota[d]]
    hands: list[list[int]] = [[] for _ in range(devices)]
    which, where = rng.random(len(labels)), rng.random(len(labels))
    for u, v in zip(which, where, strict=True):
        place = int(u * len(open_devices))
        device = open_devices[place]
        row = cumulative[device] if cumulative[device, -1] > 0 else np.cumsum(left)
        c = int(np.searchsorted(row, v * row[-1], side="right"))
        hands[device].append(piles[c].pop())
        left[c] -= 1
        if not left[c]:
            cumulative = np.cumsum(prior * (left > 0), axis=1)
        if len(hands[device]) == quota[device]:
            open_devices[place] = open_devices[-1]
            open_devices.pop()
    return _sorted(hands)


def dirichlet_by_class(
    labels: Index, devices: int, rng: np.random.Generator, alpha: float, minimum: int = 10
) -> list[Index]:
    """Deals each class in shares ~ Dirichlet(alpha), without the devices that are full (Yurochkin et al. 2019).

    Repeats until the smallest device has `minimum` examples, at most TRIES times.
    """
    classes, full = int(labels.max()) + 1, len(labels) / devices
    for _ in range(TRIES):
        hands: list[list[int]] = [[] for _ in range(devices)]
        for c in range(classes):
            pile = rng.permutation(np.flatnonzero(labels == c))
            shares = rng.dirichlet(np.full(devices, alpha)) * [len(hand) < full for hand in hands]
            if not shares.sum() > 0:
                break  # all shares fell to full devices
            cuts = np.floor(np.cumsum(shares / shares.sum()) * len(pile)).astype(int)[:-1]
            for hand, part in zip(hands, np.split(pile, cuts), strict=True):
                hand.extend(part)
        else:
            if min(map(len, hands)) >= minimum:
                return _sorted(hands)
    raise DataError(
        f"no split of {len(labels)} examples over {devices} devices with split.alpha={alpha:g} gave every device "
        f"{minimum} examples in {TRIES} tries: raise split.alpha, or lower split.minimum or devices.number"
    )


def _sorted(hands: Any) -> list[Index]:
    return [np.sort(np.asarray(hand, dtype=np.int64)) for hand in hands]


def hold_out(data: Data, share: float, seed: int) -> tuple[Data, Data | None]:
    """Holds out a share of the training examples, before they are dealt; of data that comes split, of each device's.

    Returns the data without them, and data whose test examples they are, or None if the share is 0.
    """
    if not share:
        return data, None
    groups = data.shards or (np.arange(len(data.y)),)
    rng, held = seeds.stream(seed, "validation"), np.zeros(len(data.y), bool)
    for group in groups:
        # Every device keeps an example to train on.
        number = min(round(share * len(group)), len(group) - 1)
        held[rng.permutation(group)[:number]] = True
    if not held.any():
        raise DataError(f"evaluation.validation={share:g} holds out no example: raise it, or set it to 0")
    index = torch.from_numpy(np.flatnonzero(held)).to(data.device)
    # Its training examples are only a sample for trials of models.
    sample = {"x": take(data.x, slice(2)), "y": data.y[:2]}
    validation = replace(data, **sample, x_test=take(data.x, index), y_test=data.y[index], shards=(), test_shards=())
    return data.keep(torch.from_numpy(np.flatnonzero(~held)).to(data.device)), validation


def deal_tests(data: Data, seed: int) -> list[Index]:
    """Deals the test data to the devices: to each in the class mix of its training data, every example once.

    A device is owed n_c·(its share of the training examples of class c) of the n_c test examples of a class. It gets
    the whole part; what is left of a class goes to the devices that are owed most over all classes so far, so that
    their numbers of examples stay in proportion too. Data without classes counts as one class.
    """
    rng, devices = seeds.stream(seed, "split of the test data"), len(data.shards)
    train, test = (y.cpu().numpy() if data.classes else np.zeros(len(y), np.int64) for y in (data.y, data.y_test))
    held = np.stack([np.bincount(train[shard], minlength=max(data.classes, 1)) for shard in data.shards])
    hands: list[list[int]] = [[] for _ in range(devices)]
    owed = np.zeros(devices)
    for c in np.unique(test):
        pile = rng.permutation(np.flatnonzero(test == c))
        # A class that nobody trains on is dealt by the devices' sizes.
        counts = held[:, c] if held[:, c].any() else held.sum(1)
        due = len(pile) * counts / counts.sum()
        number = np.floor(due).astype(np.int64)
        owed += due - number
        first = np.lexsort((rng.random(devices), -owed, counts == 0))[: len(pile) - number.sum()]
        number[first] += 1
        owed[first] -= 1
        for hand, part in zip(hands, np.split(pile, np.cumsum(number)[:-1]), strict=True):
            hand.extend(part)
    return _sorted(hands)


def deal(data: Data, split: SplitConfig, devices: int, seed: int) -> list[Index]:
    """Deals the training data to the devices, as configured."""
    labels, rng = data.y.cpu().numpy(), seeds.stream(seed, "split")
    if split.kind == "natural":
        raise DataError(
            "split.kind=natural needs data that comes split: name the devices' column with data.by, or choose iid"
        )
    if split.kind != "iid" and not data.classes:
        raise DataError(f"split.kind={split.kind} needs a class for each example: choose iid, or bring data per device")
    if len(labels) < devices:
        raise DataError(f"{len(labels)} training examples cannot be dealt to {devices} devices: lower devices.number")
    if split.kind == "iid":
        return iid(labels, devices, rng)
    if split.kind == "dirichlet":
        return dirichlet(labels, devices, rng, split.alpha)
    return dirichlet_by_class(labels, devices, rng, split.alpha, split.minimum)
