"""Chooses the device that torch computes on."""

from __future__ import annotations

import os

import torch

from fedhen.config.runtime_settings import ACCELERATORS
from fedhen.distributed.communicator import read_launcher
from fedhen.errors import ConfigError, unknown_name


def choose_device(name: str) -> torch.device:
    """Returns the accelerator of that name; each rank on a machine gets its own GPU."""
    if name not in ACCELERATORS:
        raise unknown_name("accelerator", name, ACCELERATORS)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available: choose cpu or auto as the accelerator")
    if read_launcher().number == 1:
        return torch.device("cuda")
    place, number = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= number:
        raise ConfigError(
            f"this machine has {number} GPUs, not enough for process {place + 1}: start {number} processes"
        )
    torch.cuda.set_device(place)
    return torch.device("cuda", place)
