"""Scores of models on the devices' own test data: whose are scored when, and how records have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from fedhen.devices.population import Population
from fedhen.engines.own_models import OwnSums
from fedhen.errors import DataError
from fedhen.runs.layout import LOCAL, OWN_MODELS, PERSONAL, SERVER
from fedhen.runs.records import DeviceValues
from fedhen.tasks import Classification


def choose_owners(population: Population, number: int, is_last: bool) -> tuple[str, ...]:
    """Returns whose models are scored on the devices' test data after an evaluated round."""
    config, personal = population.config, population.personal
    if not config.evaluation.own:
        return ()
    every = config.personal.every
    is_due = is_last or not personal.has_server_model or bool(every and number % every == 0)
    return (
        *([SERVER] if personal.has_server_model else []),
        *([PERSONAL] if personal.makes_models and is_due else []),
        *([LOCAL] if config.evaluation.local_epochs and is_last else []),
    )


def collect_own(population: Population, sums: Sequence[OwnSums]) -> dict[str, DeviceValues]:
    """Returns the primary metric on each device's test data, as a record has it: of devices that train, and others."""
    by_owner: dict[str, dict[int, float | None]] = {}
    for each in sums:
        by_owner.setdefault(each.owner, {})[each.device] = read_value(population, each, 0)
    found: dict[str, DeviceValues] = {}
    for key, is_held_out in (("own", False), ("held_out", True)):
        members = list_members(population, is_held_out)
        if any(members.values()) and by_owner:
            found[key] = {
                owner: {tier: [values[device] for device in devices] for tier, devices in members.items()}
                for owner, values in by_owner.items()
            }
    return found


def list_members(population: Population, is_held_out: bool = False) -> dict[str, list[int]]:
    """Returns the devices of each tier that train, or those that are held out of training."""
    return {
        tier: [
            d for d, own in enumerate(population.tier_of) if own == tier and (d in population.held_out) == is_held_out
        ]
        for tier in population.holdings
    }


def average_own(population: Population, sums: Sequence[OwnSums]) -> dict[str, Any]:
    """Returns the mean of the devices' own scores in place of the server's, as a record has them.

    That is for servers without a whole model. Every device counts once.
    """
    by_device = {each.device: each for each in sums if each.owner == PERSONAL}
    named: dict[str, Any] = {}
    for place, metric in enumerate(population.task.scores):
        means = {}
        for tier, devices in list_members(population).items():
            read = (read_value(population, by_device[device], place) for device in devices)
            if not (values := [value for value in read if value is not None]):
                raise DataError(f"no device of tier {tier!r} has test data, on which its personal model is scored")
            means[tier] = fmean(values)
        named[metric.name] = {SERVER: means}
    has_accuracy = isinstance(population.task, Classification) and "accuracy" in named
    found: dict[str, Any] = {"accuracy": named.pop("accuracy")} if has_accuracy else {}
    return {**found, **({"metrics": named} if named else {}), "scored": OWN_MODELS}


def read_value(population: Population, found: OwnSums, place: int) -> float | None:
    """Returns a metric of a device; None if it has no test data, or the value is not finite."""
    if not found.sums:
        return None
    value = float(population.task.scores[place].value(torch.tensor(found.sums[place], dtype=torch.float64)))
    return value if math.isfinite(value) else None
