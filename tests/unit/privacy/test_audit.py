"""An attacker who knows all but one device's data tells two worlds apart, with and without that device.

The mechanism keeps its promise against it, and the attacker finds each of four faults. From the rates of true and false
alarms follows a lower bound of ε, with 95 % confidence (Clopper and Pearson, as in Nasr et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedhen.algorithm.averaging import Averaging, Contribution
from fedhen.algorithm.updates import Update
from fedhen.params import Average, TierModels, shapes_of
from fedhen.privacy.accounting import gaussian_epsilon
from fedhen.privacy.central import CentralPrivacy, PrivateRound
from fedhen.privacy.noise import STEPS, NoiseSource
from support.private_rounds import make_central, make_update, nested, play

DELTA, WORLDS = 1e-3, 600
"""With 600 plays of each world no more than ε = 4.3 can be shown."""
SHARED = {f"shared{number}": [4] for number in range(4)}
OWN = {"top": [1500], **{f"own{number}": [2] for number in range(5)}}
HOLDERS = {"simple": 3, "complex": 3}


class DividesByWhoCame(CentralPrivacy):
    """Fault: sum and noise are divided by the number of devices that were there."""

    def begin(self, number: int, sent: TierModels, updates: Sequence[Update]) -> Averaging:
        counts = Average(shapes_of(sent["complex"]))
        for update in updates:
            counts.add({name: torch.ones_like(tensor) for name, tensor in update.weights.items()})
        right = super().begin(number, sent, updates)
        assert isinstance(right, PrivateRound)
        return replace(right, expected=lambda pool: counts)


class RoundByTensor(PrivateRound):
    """A round in which every tensor is clipped apart from the others."""

    def enter(self, update: Update) -> Contribution:
        change = {name: tensor - self.sent[update.tier][name] for name, tensor in update.weights.items()}
        unit = self.bound / STEPS
        steps = {n: t * min(1.0, self.bound / (float(t.norm()) or 1.0)) / unit for n, t in change.items()}
        return Contribution(steps)


class ClipsByTensor(CentralPrivacy):
    """Fault: the norm of each tensor is bounded, instead of the norm of all together."""

    def begin(self, number: int, sent: TierModels, updates: Sequence[Update]) -> Averaging:
        right = super().begin(number, sent, updates)
        assert isinstance(right, PrivateRound)
        return RoundByTensor(**vars(right))


class ForgetsBlock(CentralPrivacy):
    """Fault: the weights that only complex devices have get no noise."""

    def begin(self, number: int, sent: TierModels, updates: Sequence[Update]) -> Averaging:
        right = super().begin(number, sent, updates)
        assert isinstance(right, PrivateRound)

        def draw(pool: str, name: str, shape: tuple[int, ...]) -> Tensor:
            noise = right.draw(pool, name, shape)
            return noise if name in SHARED else torch.zeros_like(noise)

        return replace(right, draw=draw)


def scores(after: TierModels, server: TierModels) -> list[float]:
    """Returns how far each block has moved in the direction of the canary, and how far it is spread."""
    moved = {name: after["complex"][name] - tensor for name, tensor in server["complex"].items()}
    blocks = [[*SHARED], [*OWN]]
    along = [sum(float(moved[name].sum()) / moved[name].numel() ** 0.5 for name in block) for block in blocks]
    spread = [sum(float(moved[name].square().sum()) for name in block) for block in blocks]
    return [*along, sum(along), *spread]


def play_worlds(kind: type[CentralPrivacy], tier: str, replays: bool, repeats_noise: bool) -> list[np.ndarray]:
    """Returns for each world, with and without the canary, the scores of each play.

    The others send nothing. With `replays` a round is played without the canary before, and the difference of both is
    what counts; with `repeats_noise`, the fault is that the noise of a round played again is the same.
    """
    server = nested(SHARED, OWN)
    others = [make_update(n, t, server[t], {}) for n, t in enumerate(("simple", "simple", "complex", "complex"))]
    # As long as a change may be in every tensor, all of its numbers alike.
    change = {name: torch.full_like(tensor, tensor.numel() ** -0.5) for name, tensor in server[tier].items()}
    canary = make_update(9, tier, server[tier], change)
    found = []
    for updates in ([*others, canary], others):
        each = []
        for number in range(WORLDS):
            mechanism = make_central(server, HOLDERS, rate=2 / 3, kind=kind)
            mechanism.source = _fixed_source(number, repeats_noise)
            before = play(mechanism, server, others) if replays else server
            ledger = mechanism.ledger
            again = play(mechanism, server, updates)
            assert mechanism.ledger.releases == ledger.releases + 1
            each.append(scores(again, before))
        found.append(np.array(each))
    return found


def _fixed_source(number: int, repeats_noise: bool) -> NoiseSource:
    """Returns keys that are new in every world and, if they should be, in every release."""
    return NoiseSource(
        lambda release: np.random.default_rng([number, 0 if repeats_noise else release]).bytes(32), is_fresh=False
    )


def lower_bound(inside: np.ndarray, outside: np.ndarray) -> float:
    """Returns the largest ε that any threshold on any score shows, with 95 % confidence for all of them together."""
    best = 0.0
    for column in range(inside.shape[1]):
        for one, other, sign in (
            (inside, outside, 1),
            (inside, outside, -1),
            (outside, inside, 1),
            (outside, inside, -1),
        ):
            here, there = sign * one[:, column], sign * other[:, column]
            for threshold in np.quantile(there, [0.5, 0.9, 0.99, 1.0]):
                hits, alarms = int((here > threshold).sum()), int((there > threshold).sum())
                low = stats.beta.ppf(LEVEL, hits, WORLDS - hits + 1) if hits else 0.0
                high = stats.beta.ppf(1 - LEVEL, alarms + 1, WORLDS - alarms) if alarms < WORLDS else 1.0
                if low > DELTA:
                    best = max(best, float(np.log((low - DELTA) / high)))
    return best


LEVEL = 0.05 / (2 * 5 * 4 * 4)
"""Of each of the bounds that are tried: 5 scores, 4 ways to compare them and 4 thresholds (Bonferroni)."""
FAULTS = {
    "none": (CentralPrivacy, False, False),
    "none, played again": (CentralPrivacy, True, False),
    "actual counts": (DividesByWhoCame, False, False),
    "clip by tensor": (ClipsByTensor, False, False),
    "no noise on a block": (ForgetsBlock, False, False),
    "noise seeded by round": (CentralPrivacy, True, True),
}


CASES = [("simple", "none"), *(("complex", fault) for fault in FAULTS)]
"""The faults show most with a complex device, which is in every block."""


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "fault"), CASES)
def test_the_audit_passes_the_mechanism_and_finds_each_fault(tier: str, fault: str) -> None:
    """z = 1, so a device costs at most ε = 3.14 at δ = 1e-3."""
    theory = gaussian_epsilon(1.0, DELTA)
    assert theory == pytest.approx(3.14, abs=0.005)
    kind, replays, repeats_noise = FAULTS[fault]
    shown = lower_bound(*play_worlds(kind, tier, replays, repeats_noise))
    assert shown <= theory if fault.startswith("none") else shown > theory
