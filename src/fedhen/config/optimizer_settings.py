"""Which settings each optimiser reads. A setting that would have no effect is refused."""

from __future__ import annotations

from collections.abc import Mapping

from fedhen.config.training_settings import LocalConfig, ServerConfig, TrainingConfig
from fedhen.errors import ConfigError

TRAINING = {
    "sgd": ("momentum",),
    "adam": ("beta1", "beta2", "epsilon"),
    "adamw": ("beta1", "beta2", "epsilon"),
}
"""`training.optimizer` -> the settings of `training` that only some optimisers read, as far as it reads them."""
SERVER = {
    "none": (),
    "momentum": ("lr", "beta1"),
    "adagrad": ("lr", "beta1", "tau"),
    "adam": ("lr", "beta1", "beta2", "tau"),
    "yogi": ("lr", "beta1", "beta2", "tau"),
}
"""The same for `server.optimizer`."""


def check_optimizers(training: TrainingConfig, server: ServerConfig, local: LocalConfig) -> None:
    """Raises a ConfigError if a setting does not fit the chosen optimisers."""
    check_settings_are_read("training", training, TRAINING)
    check_settings_are_read("server", server, SERVER)
    if training.optimizer_state == "device" and training.optimizer == "sgd" and not training.momentum:
        raise ConfigError(
            "training.optimizer_state=device has nothing to keep: set training.momentum, or another training.optimizer"
        )
    if local.name == "scaffold" and training.optimizer != "sgd":
        # Its memory (w_server − w_i)/(K·lr) is the mean gradient only after K plain steps of size lr.
        raise ConfigError(
            f"local.name=scaffold does not work with training.optimizer={training.optimizer}: set it to sgd, "
            "or use local.name=feddyn"
        )


def check_settings_are_read(
    section: str, settings: TrainingConfig | ServerConfig, read_by: Mapping[str, tuple[str, ...]]
) -> None:
    """Raises a ConfigError if a setting that the optimiser does not read is not its default."""
    default = type(settings)()
    for name in sorted({name for names in read_by.values() for name in names} - {*read_by[settings.optimizer]}):
        if getattr(settings, name) != getattr(default, name):
            readers = " or ".join(optimizer for optimizer, names in read_by.items() if name in names)
            raise ConfigError(
                f"{section}.{name} has no effect with {section}.optimizer={settings.optimizer}: "
                f"set it to {getattr(default, name)}, or set {section}.optimizer to {readers}"
            )
