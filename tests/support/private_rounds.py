"""Rounds with differential privacy on small nests, played without training: updates are given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedhen.algorithm.merging import Pools, merge, share_common_weights
from fedhen.algorithm.updates import Update
from fedhen.config.training_settings import ServerConfig
from fedhen.params import TierModels, Weights
from fedhen.privacy.accounting import Accountant
from fedhen.privacy.central import CentralPrivacy, noise_shapes
from fedhen.privacy.ledger import Ledger
from fedhen.privacy.noise import make_seeded_source


def make_central(
    server: TierModels,
    holders: Mapping[str, int],
    *,
    bound: float = 1.0,
    noise: float = 1.0,
    rate: float = 0.5,
    separation: int = 1,
    pools: Pools = share_common_weights,
    kind: type[CentralPrivacy] = CentralPrivacy,
    rule: ServerConfig | None = None,
    contributed: Mapping[str, Collection[str]] | None = None,
    within: float = 0.0,
    **more: Any,
) -> CentralPrivacy:
    """Makes the mechanism of a run whose devices are sampled with this rate."""
    contributed = contributed or {tier: [*weights] for tier, weights in server.items()}
    values: dict[str, Any] = {
        "accountant": Accountant(noise, 1e-3, rate=rate if separation == 1 else 1.0, separation=separation),
        "holders": holders,
        "contributed": contributed,
        "rate": rate,
        "source": make_seeded_source(0),
        "within": within,
        "model_bytes": {},
    }
    shapes = noise_shapes(pools([*server]), server, contributed, bool(within))
    ledger = Ledger((0,), bound, shapes=shapes, bands=separation)
    return kind(rule or ServerConfig(), ledger, **values | more)


def make_update(device: int, tier: str, received: Weights, change: Mapping[str, Tensor]) -> Update:
    """Makes the update of a device that has changed its weights by this much."""
    weights = {name: tensor + change[name] if name in change else tensor for name, tensor in received.items()}
    return Update(device, tier, weights, frozenset(received), samples=1, loss=0.0)


def play(
    mechanism: CentralPrivacy,
    server: TierModels,
    updates: Sequence[Update],
    pools: Pools = share_common_weights,
) -> TierModels:
    """Plays a round and returns the next models."""
    number = mechanism.ledger.releases + 1
    return merge(server, updates, pools, mechanism.begin(number, server, updates)).models


def nested(simple: Mapping[str, Sequence[int]], more: Mapping[str, Sequence[int]]) -> TierModels:
    """Returns float64 models of zeros: the complex one has the simple one's weights and more."""
    shared: Weights = {name: torch.zeros(tuple(shape)).double() for name, shape in simple.items()}
    return {
        "simple": shared,
        "complex": {**shared, **{n: torch.zeros(tuple(shape)).double() for n, shape in more.items()}},
    }
