"""Local variants: what a device adds to its gradient and remembers, and what the server derives from the memories.

A local step is: gradient of the loss, plus the correction, clip, decay, update (Alg. 2 with one more term). The
correction of every variant here has the form offset + pull·w before the clip, and a further decay after it, so that an
engine can apply it in one pass.

Unequal tiers: a device corrects and remembers only the weights that it trains. The server's state is the mean of the
devices' memories. For each weight, the mean is over *all* devices of the pool that train it, active or not. ω_i =
n_i·N/n is over the devices of the pool. At the fixed point Σ_i n_i ∇f_i = 0 over the holders of each weight, so that
every weight reaches the optimum of the sample-weighted sum of the objectives that it appears in. With one tier these
are the methods as published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedhen.config.training_settings import LocalConfig
from fedhen.params import Weights


@dataclass(frozen=True)
class Correction:
    """Terms added to the gradient of a weight w: offset + pull·w before the clip, decay·w after it."""

    offset: Mapping[str, Tensor] = field(default_factory=dict)
    pull: float = 0.0
    decay: float = 0.0


NO_CORRECTION = Correction()


@dataclass(frozen=True)
class LocalContext:
    """The state of a device in a round, from which a variant computes its correction."""

    received: Weights
    """The weights that the device trains, as it received them."""
    memory: Weights
    """What the device remembers. Missing weights stand for zeros; all are missing before its first round.

    Entries of other names, such as the state of its optimiser, are not the variant's.
    """
    mean: Weights
    """The server's state: the mean of all devices' memories. Missing weights stand for zeros."""
    omega: float
    """ω_i = n_i·N/n: the device's share of the data, 1 if all devices have the same amount."""


@dataclass(frozen=True)
class LocalVariant:
    """A change of local training, with an optional memory on each device.

    FedProx, which needs no memory:

        def pull_to_server(context):
            return Correction({name: -mu * w for name, w in context.received.items()}, pull=mu)

        LocalVariant("fedprox", pull_to_server)
    """

    name: str
    """As in the setting `local.name`."""
    correction: Callable[[LocalContext], Correction] = lambda context: NO_CORRECTION
    """Computes what is added to the gradient in all steps of the round."""
    remember: Callable[[LocalContext, Weights, float], Weights] | None = None
    """(context, trained weights, steps · learning rate) -> the device's next memory. None if it has no memory."""
    infer_change: Callable[[Weights, Weights], Weights] | None = None
    """(received, trained) -> the change of the memory, if the server can compute it; devices then need not send it."""
    memory_weight: Callable[[float], float] = lambda omega: 1.0
    """ω_i -> the device's weight in the mean of the memories."""
    uses_omega: bool = False
    """Whether `correction` or `remember` depend on ω_i. Devices are told it only then."""
    starting_weight: Callable[[Tensor, Tensor], Tensor] = lambda model, mean: model
    """(server's weight, mean of the memories) -> the weight that devices start from."""
    copies: int = 0
    """How many more tensors of the size of the trained weights are sent with the model, down and up."""


PLAIN = LocalVariant("plain")
"""Alg. 2 without a correction."""


def fedprox(mu: float) -> LocalVariant:
    """FedProx (Li et al. 2018): f + μ/2·‖w − w_server‖², inside the clip, without memory."""
    if not mu:
        return PLAIN

    def correction(context: LocalContext) -> Correction:
        return Correction({name: -mu * tensor for name, tensor in context.received.items()}, pull=mu)

    return LocalVariant("fedprox", correction)


def scaffold() -> LocalVariant:
    """SCAFFOLD (Karimireddy et al. 2019): f + ⟨w, c/ω_i − c_i⟩.

    After K steps c_i′ = c_i − c + (w_server − w_i)/(K·lr), and c += (1/N)·Σ ω_i (c_i′ − c_i). c is sent down with
    the model and c_i′ − c_i up with the update, which doubles the trained weights in both directions.
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

    return LocalVariant("scaffold", correction, remember, memory_weight=lambda omega: omega, uses_omega=True, copies=1)


def feddyn(alpha: float) -> LocalVariant:
    """FedDyn (Acar et al. 2021), α_i = α/ω_i: f + α_i⟨w, h_i − w_cld⟩, and decay + α_i.

    h_i += w_i − w_cld, and devices start from w_cld = mean_active(w_i) + mean_all(h). The models scored are mean_active
    and the all-devices average, never w_cld. The server computes h_i from w_cld and w_i, so that only weights are sent.
    With α = 0 it is not FedAvg: h still accumulates.
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

    return LocalVariant(
        "feddyn", correction, remember, infer_change, uses_omega=True, starting_weight=lambda model, mean: model + mean
    )


def make_local_variant(config: LocalConfig) -> LocalVariant:
    variants: dict[str, Callable[[], LocalVariant]] = {
        "plain": lambda: PLAIN,
        "fedprox": lambda: fedprox(config.mu),
        "scaffold": scaffold,
        "feddyn": lambda: feddyn(config.alpha),
    }
    return variants[config.name]()


def _get_or_zeros(weights: Mapping[str, Tensor], like: Tensor, name: str) -> Tensor:
    return weights[name] if name in weights else torch.zeros_like(like)
