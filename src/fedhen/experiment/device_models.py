"""The personal models of devices, made again from a run's newest checkpoint and the devices' training data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fedhen.algorithm.methods import load_method
from fedhen.algorithm.personal import make_personal
from fedhen.config import toml
from fedhen.data.dataset import FederatedData
from fedhen.engines.personal_models import PersonalModels
from fedhen.engines.sequential import SequentialDevices
from fedhen.errors import ConfigError
from fedhen.experiment.build import OwnParts, build_population, choose_data, start_experiment
from fedhen.experiment.checkpoint_files import Checkpoint
from fedhen.experiment.checkpoint_state import Restored, check_checkpoint, restore_state
from fedhen.experiment.experiment import Experiment
from fedhen.experiment.resume import NEW_RUN, RunStart
from fedhen.experiment.saved_models import open_newest
from fedhen.fileio.python_files import refuse_reference
from fedhen.models.model_card import ModelCard
from fedhen.models.model_files import keep_exits
from fedhen.runs.folders import find_config, refuse_fleet_run
from fedhen.runs.private import read_secret


@dataclass(frozen=True)
class DeviceModel:
    """The model of a device of a run, and the data of all devices."""

    module: nn.Module
    """It returns the outputs of the card's exits."""
    card: ModelCard
    tier: str
    round: int
    """The round that it is of."""
    data: FederatedData
    """With the shards of the devices."""


@torch.enable_grad()  # The caller may have turned gradients off, and a device's model is trained.
def make_device_model(folder: Path, device: int, own: OwnParts, data_root: Path) -> DeviceModel:
    """Returns the model of a device of a run."""
    config = toml.read_toml(find_config(folder))
    refuse_fleet_run(folder)
    if not make_personal(config).makes_models:
        raise ConfigError(f"{folder} has no personal models: load the model of a tier")
    if device not in range(config.devices.number):
        raise ConfigError(f"device {device} is not in {folder}: its devices are 0 to {config.devices.number - 1}")
    refuse_reference(config.method_file, "method")
    method = load_method(config.method)
    data = choose_data(own.data, config.data, data_root, config.seed)
    secret = read_secret(folder)
    population = build_population(config, method, data, own.family, own.task, own.initial, secret)
    experiment = start_experiment(population)
    experiment.restore(open_newest(folder, partial(restore_from, folder, experiment)))
    population, tier = experiment.population, experiment.population.tier_of[device]
    models = PersonalModels(SequentialDevices(population, experiment.memory))
    module = models.make_own(experiment.played, experiment.server, device)
    card = experiment.cards()[tier]
    module = keep_exits(module, population.family.exits(tier), card.exits)
    return DeviceModel(module, card, tier, experiment.played, population.data)


def restore_from(folder: Path, experiment: Experiment, saved: Checkpoint) -> Restored:
    """Reads a checkpoint. Raises a FedhenError if the run was played with other data."""
    RunStart(folder, experiment, NEW_RUN).check_data(saved.manifest["digests"])
    plan = check_checkpoint(saved, experiment.state())
    return restore_state(saved, plan, experiment.state())
