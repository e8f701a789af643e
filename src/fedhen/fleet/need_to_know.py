"""What server and nodes tell each other of a run: no more than its settings need."""

from __future__ import annotations

from dataclasses import replace

from fedhen.config import toml
from fedhen.config.settings import Config

BY_LOSS = ("loss", "oort")
"""Samplings that depend on the devices' losses."""


def describe_run(config: Config) -> str:
    """Returns the configuration that nodes get, as TOML: without the seed, which says nothing that they need."""
    return toml.to_toml(replace(config, seed=0))


def needs_losses(config: Config) -> bool:
    """Returns whether nodes report the losses of their training."""
    return not config.privacy.is_private and (config.fleet.losses or config.devices.sampling in BY_LOSS)
