"""Chooses the mechanism of a run."""

from __future__ import annotations

from fedhen.config.settings import Config
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.errors import ConfigError
from fedhen.privacy.bounded import BoundedUpdates
from fedhen.privacy.mechanism import Mechanism
from fedhen.privacy.refusals import refusals


def make_mechanism(config: Config, ranks: Ranks = ALONE) -> Mechanism:
    """Makes the configured mechanism. Raises a ConfigError if the run cannot keep what it promises."""
    if found := refusals(config):
        raise ConfigError(f"privacy.mechanism={config.privacy.mechanism}: {'; '.join(found)}")
    if config.privacy.mechanism == "bounded":
        return BoundedUpdates(config.server, config.privacy.bound, ranks)
    return Mechanism(config.server)
