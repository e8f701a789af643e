"""The server's optimisers: what the server makes of the change from its weights to the average of the devices'.

For every element of a weight, with Δ = average − old (Reddi et al. 2021, "Adaptive Federated Optimization", Alg. 2; Hsu
et al. 2019 for FedAvgM). There is no bias correction, as in the paper.

They work on the overlay of a pool's tiers, as the average does: tiers share the moments of a weight where they share
the weight, and tiers that are kept apart have separate ones. An element to which no active device contributed keeps its
value and its moments. What no device learns (buffers, frozen weights, whole numbers) takes the average.

Moments are in float64, as the sums of the average are: Δ² is often far below the rounding of τ² in float32, and there
is one set of moments for all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedhen.config.training_settings import ServerConfig
from fedhen.params import Average, TierModels, Weights

Moments = Mapping[str, Tensor]
"""The moments of one weight by their kind."""
Step = Callable[[Moments, Tensor], tuple[Moments, Tensor]]
"""(moments of a weight, Δ) -> (its next moments, what is added to the weight)."""


def _no_step(moments: Moments, delta: Tensor) -> tuple[Moments, Tensor]:
    return moments, delta


@dataclass(frozen=True)
class ServerOptimizer:
    """How the server steps towards the average. Without moments it takes the average itself.

    FedAvgM with β = 0.9:

        def heavy_ball(moments, delta):
            mean = 0.9 * moments["mean"] + delta
            return {"mean": mean}, mean

        ServerOptimizer({"mean": 0.0}, heavy_ball)
    """

    initial: Mapping[str, float] = field(default_factory=dict)
    """Kind of moment -> its value before the first round."""
    step: Step = _no_step

    def start(self, server: TierModels, learned: Mapping[str, Collection[str]]) -> TierModels:
        """Returns the moments before the first round, of the weights that any tier's devices learn."""
        if not self.initial:
            return {}
        steered = set().union(*learned.values())
        return {
            tier: {
                f"{kind}/{name}": torch.full_like(weight, value, dtype=torch.float64)
                for kind, value in self.initial.items()
                for name, weight in weights.items()
                if name in steered
            }
            for tier, weights in server.items()
        }

    def apply(self, before: Weights, average: Average, moments: Weights) -> tuple[Weights, Weights]:
        """Returns the next weights of a pool, and their next moments."""
        steered = {key.partition("/")[2] for key in moments}
        after = average.finish({name: tensor for name, tensor in before.items() if name not in steered})
        # In float64: a rounded average would be noise in Δ.
        means = average.finish({name: before[name].double() for name in steered})
        next_moments: Weights = {}
        for name, mean in means.items():
            old, held = before[name].double(), average.is_held(name, before[name])
            mine = {kind: moments[f"{kind}/{name}"] for kind in self.initial}
            changed, added = self.step(mine, mean - old)
            after[name] = torch.where(held, old + added, old).to(before[name].dtype)
            next_moments |= {f"{kind}/{name}": torch.where(held, changed[kind], mine[kind]) for kind in self.initial}
        return {name: after[name] for name in before}, {key: next_moments[key] for key in moments}


TAKE_AVERAGE = ServerOptimizer()
"""The paper's server."""
NO_MOMENTS: TierModels = {}


def momentum(config: ServerConfig) -> ServerOptimizer:
    """FedAvgM: m = β1·m + Δ, w += lr·m."""

    def step(moments: Moments, delta: Tensor) -> tuple[Moments, Tensor]:
        mean = config.beta1 * moments["mean"] + delta
        return {"mean": mean}, config.lr * mean

    return ServerOptimizer({"mean": 0.0}, step)


def adaptive(config: ServerConfig, next_square: Callable[[Tensor, Tensor], Tensor]) -> ServerOptimizer:
    """FedAdagrad, FedAdam, FedYogi: m = β1·m + (1 − β1)·Δ, v from v and Δ², w += lr·m / (√v + τ). At first v = τ²."""

    def step(moments: Moments, delta: Tensor) -> tuple[Moments, Tensor]:
        mean = config.beta1 * moments["mean"] + (1 - config.beta1) * delta
        square = next_square(moments["square"], delta.square())
        return {"mean": mean, "square": square}, config.lr * mean / (square.sqrt() + config.tau)

    return ServerOptimizer({"mean": 0.0, "square": config.tau**2}, step)


SERVER_OPTIMIZERS: Mapping[str, Callable[[ServerConfig], ServerOptimizer]] = {
    "none": lambda config: TAKE_AVERAGE,
    "momentum": momentum,
    "adagrad": lambda config: adaptive(config, lambda v, d: v + d),
    "adam": lambda config: adaptive(config, lambda v, d: config.beta2 * v + (1 - config.beta2) * d),
    "yogi": lambda config: adaptive(config, lambda v, d: v - (1 - config.beta2) * d * (v - d).sign()),
}
"""`server.optimizer` -> settings -> optimiser."""


def make_server_optimizer(config: ServerConfig) -> ServerOptimizer:
    return SERVER_OPTIMIZERS[config.optimizer](config)
