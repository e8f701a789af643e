"""Central differential privacy: a sum of bounded changes, noise on every weight, and denominators that are fixed.

u_i = δ_i · min(1, S / ‖δ_i‖)          one norm over all weights that the device holds
Y   = Σ u_i + N(0, (zS)²·I)            over the devices that returned; noise on every weight that any device holds
w'  = received + Y / (q·N_j)           N_j devices hold weight j, whether they are active or not

One device changes the sum by at most S, jointly over all blocks, and all else is fixed. See docs/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedhen.algorithm.averaging import Averaging, Contribution
from fedhen.algorithm.updates import Update
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.params import Average, Shapes, TierModels, Weights, overlay, shapes_of
from fedhen.privacy.accounting import Accountant
from fedhen.privacy.bands import band_norm
from fedhen.privacy.clipping import compute_norm, find_change
from fedhen.privacy.mechanism import Mechanism
from fedhen.privacy.noise import STEPS, NoiseSource, correlate, draw_normal

WITHIN_NOISE = 2.0
"""Deviation of the noise on the number of changes within the bound, in units of z. A device changes it by a half."""
WITHIN = "number within"
"""The pool and the name of that number's noise. No tier can have such a name."""
ROUNDING = 1e-12
"""Norms are computed to this part of them. Changes are shortened by as much, so that S is never passed."""
SMALLEST_BOUND, LARGEST_BOUND = 1e-12, 1e12
"""Between which a bound follows the norms."""


def name_pool(pool: Sequence[str]) -> str:
    return "+".join(pool)


@dataclass(frozen=True)
class PrivateRound:
    """Averages one round with noise. Sums are in whole steps, so they are exact in any order."""

    sent: TierModels
    contributed: Mapping[str, Collection[str]]
    """Tier -> the weights that its devices contribute to the average. All else that a device sends is ignored."""
    bound: float
    norms: Mapping[int, float]
    """Device -> the norm of its change."""
    expected: Callable[[tuple[str, ...]], Average]
    """Pool -> an average whose counts are the denominators q·N_j."""
    draw: Callable[[str, str, tuple[int, ...]], Tensor]
    """(pool, weight, shape) -> the noise of this round, in steps."""

    def enter(self, update: Update) -> Contribution:
        norm = self.norms[update.device]
        factor = min(1.0, self.bound / norm) * (1 - ROUNDING) * STEPS / self.bound if norm else 0.0
        change = find_contributed_change(update, self.sent, self.contributed)
        # Rounded towards 0, which makes no number larger.
        steps = {n: (t * factor).trunc() if factor else torch.zeros_like(t) for n, t in change.items()}
        return Contribution(steps)

    def finish(self, average: Average, before: Weights, pool: tuple[str, ...]) -> Average:
        base = overlay([self.sent[tier] for tier in pool])
        expected, after = self.expected(pool), Average(shapes_of(base))
        for name, counts in expected.counts.items():
            total = self.draw(name_pool(pool), name, tuple(base[name].shape)).to(base[name].device)
            if name in average.sums:
                total = total + average.sums[name]
            change = total * (self.bound / STEPS) / counts
            after.sums[name] = base[name].double() + change
            # Where nobody ever contributes, the weight keeps its value.
            after.counts[name] = (counts > 0).double() if isinstance(counts, Tensor) else 1.0
        return after


@dataclass(kw_only=True)
class CentralPrivacy(Mechanism):
    """Bounds every change, adds noise to the sums, and keeps account of the ε that is spent."""

    accountant: Accountant
    holders: Mapping[str, int]
    """Tier -> the number of its devices, active or not."""
    contributed: Mapping[str, Collection[str]]
    """Tier -> the weights that its devices contribute to the average."""
    rate: float
    """q, the share of the devices that is active in a round on average."""
    source: NoiseSource
    """Where the keys of the noise come from. It is asked on rank 0 only."""
    within: float = 0.0
    """The share of changes that the bound is to contain; 0: the bound is fixed."""
    within_rate: float = 0.2
    budget: float = 0.0
    model_bytes: Mapping[str, Mapping[str, int]]
    """Direction, "down" or "up" -> tier -> the bytes of one device in a round."""
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        self.denominators: dict[tuple[str, ...], Average] = {}
        self.used_bound = self.ledger.bound

    def begin(self, number: int, sent: TierModels, updates: Sequence[Update]) -> Averaging:
        norms = {u.device: compute_norm(find_contributed_change(u, sent, self.contributed)) for u in updates}
        bound, past = self.ledger.bound, self.ledger.past
        noise: TierModels = {}
        release = self.ledger.releases + 1
        # Every rank adds the same noise.
        key = bytes.fromhex(self.ranks.first(lambda: self.source.draw_key(release).hex()))

        def draw(pool: str, name: str, shape: tuple[int, ...]) -> Tensor:
            scale = self.noise_of(pool) * band_norm(self.accountant.separation) * STEPS
            fresh = draw_normal(key, f"{pool}/{name}", shape) * scale
            noise.setdefault(pool, {})[name] = made = correlate(fresh, [each[pool][name] for each in past])
            return made

        next_bound = self.adapt_bound(norms, bound, draw) if self.within else bound
        kept = (noise, *past)[: self.accountant.separation - 1]
        self.ledger = replace(self.ledger, streams=self.count_release(), bound=next_bound, past=kept)
        self.used_bound = bound
        expected = partial(self.find_denominators, sent=sent)
        return PrivateRound(sent, self.contributed, bound, norms, expected, draw)

    def count_release(self) -> tuple[int, ...]:
        """Returns the streams with one more release. It counts before the noisy sum is made."""
        *earlier, current = self.ledger.streams
        return (*earlier, current + 1)

    def noise_of(self, pool: str) -> float:
        """Returns the multiplier of a noise. What the number of changes within the bound costs, the weights pay.

        One query with z⁻² = z_Δ⁻² + (2σ_b)⁻², and σ_b = 2z (Andrew et al. 2019, Theorem 1).
        """
        z = self.accountant.noise
        if pool == WITHIN:
            return WITHIN_NOISE * z
        return z / math.sqrt(1 - (2 * WITHIN_NOISE) ** -2) if self.within else z

    def adapt_bound(self, norms: Mapping[int, float], bound: float, draw: Callable[..., Tensor]) -> float:
        """Returns S·exp(-η·(b - γ)), b being the noisy share of the changes within the bound."""
        halves = self.ranks.gather([0.5 if norm <= bound else -0.5 for norm in norms.values()])
        noisy = sum(sum(own) for own in halves) + float(draw(WITHIN, WITHIN, (1,))) / STEPS
        share = noisy / (self.rate * sum(self.holders.values())) + 0.5
        # A noisy share may be far outside of [0, 1].
        followed = bound * math.exp(-self.within_rate * (min(max(share, 0.0), 1.0) - self.within))
        return min(max(followed, SMALLEST_BOUND), LARGEST_BOUND)

    def find_denominators(self, pool: tuple[str, ...], sent: TierModels) -> Average:
        """Returns an average whose counts are q·N_j. They are the same in every round."""
        if pool not in self.denominators:
            expected = Average(shapes_of(overlay([sent[tier] for tier in pool])))
            for tier in pool:
                ones = {name: torch.ones_like(sent[tier][name]) for name in self.contributed[tier]}
                expected.add(ones, self.rate * self.holders[tier])
            self.denominators[pool] = expected
        return self.denominators[pool]

    @property
    def epsilon(self) -> float:
        """What has been spent."""
        return self.accountant.epsilon(self.ledger.streams)

    @property
    def ending(self) -> str:
        after = self.accountant.epsilon(self.count_release())
        passed = 0 < self.budget < after
        return f"privacy.budget={self.budget:g}: another round would make ε {after:.4g}" if passed else ""

    @property
    def spent(self) -> Sequence[int]:
        return self.ledger.streams if self.source.is_fresh else ()

    def recall(self, spent: Sequence[int]) -> None:
        if sum(spent) > self.ledger.releases:
            self.ledger = self.ledger.after_loss(spent)

    def publish(self, record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Moves who took part to the server's part. The bytes that are published are those expected of a round."""
        hidden: dict[str, Any] = {"active": [], "dropped": [], "loss": None}
        expected = {
            way: {tier: round(self.rate * self.holders[tier] * size) for tier, size in each.items()}
            for way, each in self.model_bytes.items()
        }
        public = {name: value for name, value in record.items() if name not in ("failed", "late")}
        epsilon = self.epsilon
        public |= {**hidden, "bytes": expected, "bound": self.used_bound}
        public |= {"epsilon": epsilon} if math.isfinite(epsilon) else {}
        names = ("round", "active", "dropped", "failed", "late", "bytes")
        return public, {name: record[name] for name in names if name in record}


def find_contributed_change(update: Update, sent: TierModels, contributed: Mapping[str, Collection[str]]) -> Weights:
    """Returns what a device has changed in the weights that it contributes."""
    names = contributed[update.tier]
    weights = {name: tensor for name, tensor in update.weights.items() if name in names}
    return find_change(Contribution(weights, rows=update.rows), sent[update.tier])


def noise_shapes(
    pools: Sequence[Sequence[str]], server: TierModels, contributed: Mapping[str, Collection[str]], adapts: bool
) -> dict[str, Shapes]:
    """Returns pool -> the shapes of its noise."""
    found: dict[str, Shapes] = {WITHIN: {WITHIN: (1,)}} if adapts else {}
    for pool in pools:
        shapes, names = shapes_of(overlay([server[tier] for tier in pool])), [contributed[tier] for tier in pool]
        found[name_pool(pool)] = {name: shape for name, shape in shapes.items() if any(name in of for of in names)}
    return found
