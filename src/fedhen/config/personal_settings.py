"""How models become personal: what stays on a device, and how a model is adapted to the device's data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedhen.config.setting import setting
from fedhen.errors import ConfigError

if TYPE_CHECKING:
    from fedhen.config.settings import Config

EXIT, EXITS = "exit", "exits"
"""Values of `personal.part`: the last layer of the device's own exit, or of all exits that its model has."""


@dataclass(frozen=True)
class PersonalConfig:
    """Personal models: each device's own, beside or in place of the server's."""

    name: Literal["none", "finetune", "fedper", "fedrep", "fedbabu", "ditto", "perfedavg", "proto"] = setting(
        "none", "how models become personal"
    )
    part: tuple[str, ...] = setting(
        (),
        "what is personal: exit, exits, or names of layers and weights; fedper, fedrep and fedbabu never send it, "
        "finetune adapts it; empty: the exit, with fedbabu all exits, with finetune everything",
    )
    epochs: int = setting(
        0,
        "epochs in a round of what stays on the device: with fedrep of the personal part, with ditto of the device's "
        "own model; 0: training.epochs",
        least=0,
    )
    body_epochs: int = setting(1, "fedrep: epochs in a round of the rest of the model", least=0)
    pull: float = setting(1.0, "ditto: λ, the pull of the device's own model to the server's", least=0)
    alpha: float = setting(0.01, "perfedavg: α, learning rate of the inner steps, and of adaptation", above=0)
    beta: float = setting(
        0.0, "perfedavg: β, learning rate of the outer steps in the first round; 0: training.lr", least=0
    )
    order: Literal["first", "hessian-free", "full"] = setting(
        "first",
        "perfedavg: first leaves out second derivatives; hessian-free estimates them from two gradients; full "
        "differentiates through the inner steps (MAML)",
    )
    steps: int = setting(1, "perfedavg: inner steps on one batch, and steps of adaptation", least=1)
    delta: float = setting(0.001, "perfedavg, hessian-free: δ, the distance between its two gradients", above=0)
    adapt_epochs: int = setting(
        5, "epochs in which a model is adapted to a device's training data when it is scored; 0: not at all", least=0
    )
    adapt_steps: int = setting(0, "largest number of steps of this adaptation; 0: no limit", least=0)
    adapt_lr: float = setting(0.0, "learning rate of this adaptation; 0: training.lr", least=0)
    every: int = setting(
        0,
        "rounds between scores of the personal models, which are evaluated rounds too; 0: after the last round only. "
        "Methods whose server has no whole model score them in every evaluation",
        least=0,
    )


READ_BY: Mapping[str, tuple[str, ...]] = {
    "part": ("finetune", "fedper", "fedrep", "fedbabu"),
    "epochs": ("fedrep", "ditto"),
    "body_epochs": ("fedrep",),
    "pull": ("ditto",),
    **dict.fromkeys(("alpha", "beta", "order", "steps", "delta"), ("perfedavg",)),
    **dict.fromkeys(("adapt_epochs", "adapt_steps", "adapt_lr"), ("finetune", "fedper", "fedrep", "fedbabu", "ditto")),
    "every": ("finetune", "fedbabu", "ditto", "perfedavg"),
}
"""Setting of `personal` -> the values of `personal.name` that read it."""

_OWN: Mapping[str, Any] = {"evaluation": {"own": True}}
_OWN_ONLY: Mapping[str, Any] = {"evaluation": {"own": True, "devices": False}}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "finetune": _OWN,
    "fedper": _OWN_ONLY,
    "fedrep": _OWN_ONLY,
    "fedbabu": _OWN,
    "ditto": _OWN,
    "perfedavg": _OWN,
    "proto": _OWN_ONLY,
}
"""`personal.name` -> what it changes in a recipe. The user's settings take precedence."""

OWN_SCORES_ONLY = tuple(name for name, changes in SETTINGS.items() if changes is _OWN_ONLY)
"""The values of `personal.name` with which the server has no whole model to score."""

TRAINING_OTHERWISE = ("fedrep", "fedbabu", "ditto", "perfedavg", "proto")
"""The values of `personal.name` with which a round is not `training.epochs` of the usual steps."""


def check_personal(config: Config) -> None:
    """Raises a ConfigError if settings do not fit how models become personal."""
    personal, default = config.personal, PersonalConfig()
    for name, readers in READ_BY.items():
        if getattr(personal, name) != getattr(default, name) and personal.name not in readers:
            raise ConfigError(
                f"personal.{name} has no effect with personal.name={personal.name}: leave it out, or set personal.name "
                f"to {' or '.join(readers)}"
            )
    if personal.order == "hessian-free" and personal.steps > 1:
        raise ConfigError("personal.order=hessian-free makes one inner step: set personal.steps=1, or order=full")
    if not personal.body_epochs and config.local.name == "scaffold":
        raise ConfigError("local.name=scaffold needs steps of the shared weights: raise personal.body_epochs")
    if config.evaluation.local_epochs and not config.evaluation.own:
        raise ConfigError("evaluation.local_epochs needs evaluation.own=true, which scores on devices' test data")
    training = sum(config.training_sizes().values())
    if config.devices.active > training:
        raise ConfigError(
            f"devices.held_out={config.devices.held_out:g} leaves {training} devices to train, fewer than "
            f"devices.active={config.devices.active}: lower one of them"
        )
    if 0 in config.training_sizes().values():
        raise ConfigError(f"devices.held_out={config.devices.held_out:g} leaves a tier without a device: lower it")


def refuse_server_scores(config: Config) -> None:
    """Raises a ConfigError if something needs a model that only the devices have."""
    wrong = {
        "evaluation.devices=false": config.evaluation.devices,
        "evaluation.own=true": not config.evaluation.own,
        "evaluation.validation=0": bool(config.evaluation.validation),
        "evaluation.ensemble=false": config.evaluation.ensemble,
    }
    if found := [fix for fix, applies in wrong.items() if applies]:
        raise ConfigError(
            f"personal.name={config.personal.name} leaves the server without a model to score, only devices have one: "
            f"set {', '.join(found)}"
        )
