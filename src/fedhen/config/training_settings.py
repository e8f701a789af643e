"""The settings of training: on a device, on the server, and of the local variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedhen.config.setting import setting


@dataclass(frozen=True)
class TrainingConfig:
    """Alg. 2: what an active device does in a round."""

    epochs: int = setting(5, "E, passes over the device's data", least=1)
    batch_size: int = setting(50, "images in a step; the order is new in each epoch", least=1)
    max_steps: int = setting(0, "largest number of steps of a device in a round; 0: no limit", least=0)
    last_batch: Literal["keep", "drop"] = setting(
        "keep", "keep or drop a short last batch; a device's only batch is always kept"
    )
    lr: float = setting(0.1, "η, learning rate of the first round", above=0)
    lr_decay: float = setting(1.0, "factor on the learning rate from one round to the next", above=0)
    lr_schedule: Literal["constant", "cosine"] = setting(
        "constant", "cosine: the learning rate times (1 + cos(π·(t − 1) / T)) / 2 in round t of T"
    )
    lr_warmup: int = setting(
        0, "W, rounds over which the learning rate rises: times t / W in round t < W; 0: none", least=0
    )
    optimizer: Literal["sgd", "adam", "adamw"] = setting(
        "sgd", "what makes a step of the clipped gradient; adam and adamw need a smaller learning rate, like 0.001"
    )
    optimizer_state: Literal["round", "device"] = setting(
        "round",
        "round: momentum, moments and step counts start at 0 in every round; device: a device keeps its own from one of"
        " its rounds to the next, and never sends them",
    )
    momentum: float = setting(0.0, "sgd: momentum", least=0)
    beta1: float = setting(0.9, "adam, adamw: decay of the mean of the gradients", least=0, below=1)
    beta2: float = setting(0.999, "adam, adamw: decay of the mean of their squares", least=0, below=1)
    epsilon: float = setting(1e-8, "adam, adamw: added to the root of the mean square", above=0)
    weight_decay: float = setting(
        0.001,
        "weight decay, for weights that have a gradient: sgd and adam add it to the gradient after the clip, adamw"
        " shrinks the weights apart from it",
        least=0,
    )
    masked_loss: bool = setting(
        False, "set the logits of classes that a device does not hold to 0 in its loss (HeteroFL)"
    )
    clip: float = setting(10.0, "largest norm of the gradient of the summed loss over all parameters", above=0)


@dataclass(frozen=True)
class ServerConfig:
    """Alg. 1, lines 17-22: how the server averages."""

    weighting: Literal["plain", "samples"] = setting(
        "plain", "plain: every active device has the same weight; samples: its number of images"
    )
    untrained_weights: Literal["average", "skip"] = setting(
        "average",
        "weights that a device holds but does not train (NoSide's exit on complex devices): average them, or skip them",
    )
    rows_by_class: bool = setting(False, "average an output row over the devices that hold its class (HeteroFL)")
    optimizer: Literal["none", "momentum", "adagrad", "adam", "yogi"] = setting(
        "none",
        "what the server makes of the change Δ from its weights to the devices' average; none: it takes the average;"
        " momentum: FedAvgM; the others: FedAdagrad, FedAdam, FedYogi",
    )
    lr: float = setting(1.0, "server's learning rate; adagrad, adam and yogi need a smaller one, like 0.03", above=0)
    beta1: float = setting(0.9, "decay of the server's mean of Δ", least=0, below=1)
    beta2: float = setting(0.99, "adam, yogi: decay of the server's mean of Δ²", least=0, below=1)
    tau: float = setting(
        0.001, "adagrad, adam, yogi: τ, added to the root of the mean of Δ², which starts at τ²", above=0
    )


@dataclass(frozen=True)
class LocalConfig:
    """The local variant: a correction of the gradient before the clip."""

    name: Literal["plain", "fedprox", "scaffold", "feddyn"] = setting("plain", "local variant")
    mu: float = setting(1e-4, "μ of FedProx", least=0)
    alpha: float = setting(0.01, "α of FedDyn", least=0)
