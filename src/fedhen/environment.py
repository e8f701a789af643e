"""Where a run took place: versions and hardware, for the run folder."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy
import safetensors
import torch

from fedhen.config import ACCELERATORS, RuntimeConfig
from fedhen.cores import threads, usable_cores, workers
from fedhen.errors import UserError, unknown
from fedhen.ranks import ALONE, Ranks, launched
from fedhen.version import VERSION


def device_named(name: str) -> torch.device:
    """The accelerator of that name, of which each rank on a machine takes its own."""
    if name not in ACCELERATORS:
        raise unknown("accelerator", name, ACCELERATORS)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("no CUDA device is available: use --accelerator cpu or auto")
    if launched().number == 1:
        return torch.device("cuda")
    place, number = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= number:
        raise UserError(f"there is no GPU for process {place + 1} of this machine, which has {number}: start {number}")
    torch.cuda.set_device(place)
    return torch.device("cuda", place)


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    return {
        "fedhen": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
    }


def describe(device: torch.device, runtime: RuntimeConfig, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Versions and hardware."""
    return {
        "versions": versions(),
        "hardware": {
            "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cpu": _cpu_name(),
            "cores": usable_cores(),
            "workers": workers(runtime) if runtime.engine == "fast" and device.type == "cpu" else 1,
            "threads": threads(runtime),
            "ranks": ranks.number,
        },
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
