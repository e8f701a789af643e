"""Attacks: which devices are bad, and what they send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedhen import FederatedData
from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Reply, Update
from fedhen.config.privacy_settings import AttackConfig
from fedhen.errors import ConfigError, FedhenError
from fedhen.privacy.attacks import apply_attack, choose_bad_devices, flip_labels

TIERS = ["simple"] * 10 + ["complex"] * 10
RECEIVED = {"w": torch.tensor([1.0, 2.0]), "count": torch.tensor([3])}
TRAINED = {"w": torch.tensor([1.5, 1.0]), "count": torch.tensor([5])}


@dataclass
class Honest:
    """Devices whose training always has the same result."""

    def train(self, round_number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        for device in active:
            yield Update(device, TIERS[device], dict(TRAINED), frozenset("w"), 1, 0.0)


def play(kind: str, strength: float, device: int = 19, number: int = 1) -> list[float]:
    config = AttackConfig(kind, {"complex": 0.1}, strength)  # type: ignore[arg-type]
    sent = Sent({"simple": RECEIVED, "complex": RECEIVED}, {})
    (reply,) = apply_attack(config, Honest(), TIERS, 0).train(number, sent, [device])
    assert isinstance(reply, Update)
    assert reply.weights["count"].item() == 5
    found: list[float] = reply.weights["w"].tolist()
    return found


def test_what_bad_devices_send() -> None:
    """The change is (0.5, -1): shifted adds 10 to what was trained, the others multiply the change by 10 or -10."""
    assert play("shifted", 10.0) == [11.5, 11.0]
    assert play("scaled", 10.0) == [6.0, -8.0]
    assert play("reversed", 10.0) == [-4.0, 12.0]


def test_noise_is_new_in_each_round_and_follows_from_the_seed() -> None:
    assert play("noisy", 10.0) == play("noisy", 10.0) != play("noisy", 10.0, number=2)
    assert play("noisy", 1e-9) == pytest.approx([1.5, 1.0])


def test_other_devices_are_honest() -> None:
    assert play("scaled", 10.0, device=18) == [1.5, 1.0]
    assert play("none", 10.0) == [1.5, 1.0]


def test_bad_devices_are_a_share_of_each_tier() -> None:
    """A tenth of 10 is one device of each tier; with shares, round(0.2 * 10) = 2 of the complex ones alone."""
    assert choose_bad_devices(AttackConfig("scaled"), TIERS) == {9, 19}
    assert choose_bad_devices(AttackConfig("scaled", {"complex": 0.2}), TIERS) == {18, 19}
    assert choose_bad_devices(AttackConfig(), TIERS) == set()


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ({"middle": 0.1}, "unknown tier in attack.share 'middle'"),
        ({"simple": 1.5}, "must be between 0 and 1"),
        ({"simple": 0.0}, "leaves no bad device"),
    ],
)
def test_wrong_shares(share: dict[str, float], message: str) -> None:
    with pytest.raises(FedhenError, match=message):
        choose_bad_devices(AttackConfig("scaled", share), TIERS)


def test_flipped_labels() -> None:
    """Two devices of two examples: on the bad one, classes 0 and 2 of three become 2 and 0."""
    data = FederatedData.from_arrays(np.zeros((4, 2)), [1, 2, 0, 2], np.zeros((1, 2)), [0])
    dealt = data.split([np.array([0, 1]), np.array([2, 3])])
    flipped = flip_labels(AttackConfig("label-flipped", {"complex": 1.0}), dealt, ["simple", "complex"])
    assert flipped.y.tolist() == [1, 2, 2, 0]
    assert dealt.y.tolist() == [1, 2, 0, 2]


def test_flipped_labels_need_classes() -> None:
    data = FederatedData.from_arrays(np.zeros((2, 2)), np.array([0.5, 1.5]), np.zeros((1, 2)), np.array([0.0]))
    with pytest.raises(ConfigError, match="needs classification"):
        flip_labels(AttackConfig("label-flipped"), data.split([np.array([0]), np.array([1])]), ["simple", "complex"])
