"""Chooses how models become personal, and which devices never train."""

from __future__ import annotations

from collections.abc import Sequence

from fedhen import seeds
from fedhen.algorithm.personal import Personal, make_personal
from fedhen.config.personal_settings import check_personal, refuse_server_scores
from fedhen.config.settings import Config
from fedhen.errors import ConfigError
from fedhen.tasks import Classification, Task


def choose_personal(config: Config, task: Task, classes: int) -> Personal:
    """Returns how models become personal. Raises a ConfigError if settings or task do not fit."""
    check_personal(config)
    personal = make_personal(config, classes)
    if personal.by_prototypes and not isinstance(task, Classification):
        raise ConfigError(f"personal.name={personal.name} needs classes, and the task is {task.name!r}: choose another")
    if personal.by_prototypes and config.training.masked_loss:
        raise ConfigError(f"personal.name={personal.name} has no logits to mask: set training.masked_loss=false")
    if not personal.has_server_model:
        refuse_server_scores(config)
    return personal


def choose_held_out(config: Config, tier_of: Sequence[str]) -> frozenset[int]:
    """Draws the devices that never train: of each tier its share."""
    held: set[int] = set()
    for tier, size in config.training_sizes().items() if config.devices.held_out else ():
        members = [device for device, own in enumerate(tier_of) if own == tier]
        held |= {int(device) for device in seeds.stream(config.seed, "held out", tier).permutation(members)[size:]}
    return frozenset(held)
