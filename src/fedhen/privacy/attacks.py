"""Attacks: devices that send bad updates on purpose, so that users can try what a bound does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedhen import seeds
from fedhen.algorithm.rounds import Devices, Sent
from fedhen.algorithm.updates import Reply, Update
from fedhen.config.privacy_settings import AttackConfig
from fedhen.data.dataset import Data
from fedhen.errors import ConfigError, unknown_name
from fedhen.params import Weights

DEFAULT_SHARE = 0.1

Spoil = Callable[[Tensor, Tensor, float, np.random.Generator], Tensor]
"""(what was received, what was trained, strength, random stream) -> what is sent instead."""


def _add_noise(received: Tensor, trained: Tensor, strength: float, stream: np.random.Generator) -> Tensor:
    noise = torch.from_numpy(stream.standard_normal(tuple(trained.shape)))
    return trained + strength * noise.to(trained)


SPOIL: Mapping[str, Spoil] = {
    "shifted": lambda received, trained, strength, stream: trained + strength,
    "scaled": lambda received, trained, strength, stream: received + strength * (trained - received),
    "reversed": lambda received, trained, strength, stream: received - strength * (trained - received),
    "noisy": _add_noise,
}


def choose_bad_devices(config: AttackConfig, tier_of: Sequence[str]) -> frozenset[int]:
    """Returns the bad devices: of each tier the share that is configured, rounded, from its last device backwards."""
    if config.kind == "none":
        return frozenset()
    tiers = list(dict.fromkeys(tier_of))
    for tier, share in config.share.items():
        if tier not in tiers:
            raise unknown_name("tier in attack.share", tier, tiers)
        if not 0 <= share <= 1:
            raise ConfigError(f"attack.share.{tier} = {share:g} must be between 0 and 1")
    shares = config.share or dict.fromkeys(tiers, DEFAULT_SHARE)
    bad: list[int] = []
    for tier, share in shares.items():
        members = [device for device, own in enumerate(tier_of) if own == tier]
        bad += members[len(members) - round(share * len(members)) :]
    if not bad:
        raise ConfigError("attack.share leaves no bad device: raise it")
    return frozenset(bad)


@dataclass(frozen=True)
class AttackedDevices:
    """Devices of which some send something else than what they trained."""

    devices: Devices
    bad: frozenset[int]
    config: AttackConfig
    seed: int

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        """Trains all active devices, and spoils the updates of the bad ones."""
        for reply in self.devices.train(round_number, sent, active):
            if isinstance(reply, Update) and reply.device in self.bad:
                reply = replace(reply, weights=self.spoil(round_number, reply, sent.models[reply.tier]))
            yield reply

    def spoil(self, round_number: int, update: Update, received: Weights) -> Weights:
        """Returns the bad weights. Counters stay as they are."""
        stream = seeds.stream(self.seed, "attack", round_number, update.device)
        change = SPOIL[self.config.kind]
        return {
            name: change(received[name], tensor, self.config.strength, stream) if tensor.is_floating_point() else tensor
            for name, tensor in update.weights.items()
        }


def apply_attack(config: AttackConfig, devices: Devices, tier_of: Sequence[str], seed: int) -> Devices:
    """Returns the devices with the bad ones among them. Flipped labels are in the data, see `flip_labels`."""
    if config.kind in SPOIL:
        return AttackedDevices(devices, choose_bad_devices(config, tier_of), config, seed)
    return devices


def flip_labels(config: AttackConfig, data: Data, tier_of: Sequence[str]) -> Data:
    """Returns the data with class k as the k-th last on bad devices, if that is the attack."""
    if config.kind != "label-flipped":
        return data
    if data.y.dim() > 1 or not data.classes or data.y.is_floating_point():
        raise ConfigError("attack.kind=label-flipped needs classification: choose another attack")
    flipped = data.y.clone()
    for device in choose_bad_devices(config, tier_of):
        shard = torch.from_numpy(data.shards[device]).to(flipped.device)
        flipped[shard] = data.classes - 1 - flipped[shard]
    return replace(data, y=flipped)
