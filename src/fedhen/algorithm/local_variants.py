"""Local variants: what a device adds to its gradient, what it remembers, and what the server makes of it.

A step of local training is: gradient of the loss, plus the correction, clip, decay, update (Alg. 2 with one slot more).
Every variant here is a correction g + offset + pull·w before the clip and a further decay after it, so that any runtime
can apply it in one pass.

Unequal tiers. A device corrects, and remembers, just the weights that it holds and trains. The server's state is the
mean of the devices' memories, for each weight over *all* devices of the pool that train it, active or not: the mean of
the one problem that this weight takes part in. ω_i = n_i·N/n is over the devices of the pool. At the fixed point
Σ_i n_i ∇f_i = 0 over the holders of each weight, so that every weight reaches the optimum of the sample-weighted sum of
the objectives that it appears in; with one tier these are the methods as published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedhen.config.settings import LocalConfig
from fedhen.params import Weights


@dataclass(frozen=True)
class Correction:
    """Of the gradient of a weight: + offset + pull·w before the clip, and + decay·w after it."""

    offset: Mapping[str, Tensor] = field(default_factory=dict)
    pull: float = 0.0
    decay: float = 0.0


NO_CORRECTION = Correction()


@dataclass(frozen=True)
class LocalContext:
    """What a variant knows of a device in a round."""

    received: Weights
    """The weights that the device starts from, and trains."""
    memory: Weights
    """What the device remembers; nothing before its first round, which stands for zeros."""
    mean: Weights
    """The server's state: the mean of all devices' memories."""
    omega: float
    """ω_i = n_i·N/n: the device's share of the data, 1 where all have the same."""


@dataclass(frozen=True)
class LocalVariant:
    """A local variant."""

    name: str
    correction: Callable[[LocalContext], Correction] = lambda context: NO_CORRECTION
    remember: Callable[[LocalContext, Weights, float], Weights] | None = None
    """(context, trained weights, steps · learning rate) -> the device's memory after the round; none has no memory."""
    infer_change: Callable[[Weights, Weights], Weights] | None = None
    """(received, trained) -> by how much the memory changes, where the server can tell: then nothing is sent for it."""
    memory_weight: Callable[[float], float] = lambda omega: 1.0
    """ω_i -> the device's weight in the mean of the memories."""
    starting_weight: Callable[[Tensor, Tensor], Tensor] = lambda model, mean: model
    """(server's weight, mean of the memories) -> the weight that devices start from."""
    copies: int = 0
    """How many tensors of the size of the trained weights go along with the model, down and up."""


PLAIN = LocalVariant("plain")
"""Alg. 2 as it stands."""


def fedprox(mu: float) -> LocalVariant:
    """FedProx (Li et al. 2018): f + μ/2·‖w − w_server‖², inside the clip; without memory, tiers make no difference."""
    if not mu:
        return PLAIN

    def correction(context: LocalContext) -> Correction:
        return Correction({name: -mu * tensor for name, tensor in context.received.items()}, pull=mu)

    return LocalVariant("fedprox", correction)


def scaffold() -> LocalVariant:
    """SCAFFOLD (Karimireddy et al. 2019): f + ⟨w, c/ω_i − c_i⟩.

    After K steps c_i′ = c_i − c + (w_server − w_i)/(K·lr), and c += (1/N)·Σ ω_i (c_i′ − c_i). c travels down beside the
    model and c_i′ − c_i up beside the update, so that both ways carry twice the trained weights.
    """

    def correction(context: LocalContext) -> Correction:
        return Correction(
            {
                n: _get_or_zeros(context.mean, t, n) / context.omega - _get_or_zeros(context.memory, t, n)
                for n, t in context.received.items()
            }
        )

    def remember(context: LocalContext, trained: Weights, total_lr: float) -> Weights:
        return {
            n: _get_or_zeros(context.memory, t, n) - _get_or_zeros(context.mean, t, n) + (t - trained[n]) / total_lr
            for n, t in context.received.items()
        }

    return LocalVariant("scaffold", correction, remember, memory_weight=lambda omega: omega, copies=1)


def feddyn(alpha: float) -> LocalVariant:
    """FedDyn (Acar et al. 2021), α_i = α/ω_i: f + α_i⟨w, h_i − w_cld⟩, and decay + α_i.

    h_i += w_i − w_cld, and devices start from w_cld = mean_active(w_i) + mean_all(h). The models scored are mean_active
    and the all-devices average, never w_cld. The server knows w_cld and w_i: nothing is sent beside the weights. At
    α = 0 it is not FedAvg: h still accumulates.
    """

    def correction(context: LocalContext) -> Correction:
        alpha_i = alpha / context.omega
        return Correction(
            {n: alpha_i * (_get_or_zeros(context.memory, t, n) - t) for n, t in context.received.items()}, decay=alpha_i
        )

    def remember(context: LocalContext, trained: Weights, total_lr: float) -> Weights:
        return {
            n: _get_or_zeros(context.memory, context.received[n], n) + t
            for n, t in infer_change(context.received, trained).items()
        }

    def infer_change(received: Weights, trained: Weights) -> Weights:
        return {n: trained[n] - t for n, t in received.items()}

    return LocalVariant("feddyn", correction, remember, infer_change, starting_weight=lambda model, mean: model + mean)


def make_local_variant(config: LocalConfig) -> LocalVariant:
    """The local variant that is configured."""
    variants: dict[str, Callable[[], LocalVariant]] = {
        "plain": lambda: PLAIN,
        "fedprox": lambda: fedprox(config.mu),
        "scaffold": scaffold,
        "feddyn": lambda: feddyn(config.alpha),
    }
    return variants[config.name]()


def _get_or_zeros(weights: Mapping[str, Tensor], like: Tensor, name: str) -> Tensor:
    return weights[name] if name in weights else torch.zeros_like(like)
