"""Where a run took place: versions and hardware, for the run folder."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy
import safetensors
import torch

from fedhen.config import ACCELERATORS, RuntimeConfig
from fedhen.errors import UserError, unknown
from fedhen.version import VERSION


def accelerator(name: str, runtime: RuntimeConfig) -> torch.device:
    """The accelerator of that name, set up as configured; auto is a GPU where there is one."""
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    if name not in ACCELERATORS:
        raise unknown("accelerator", name, ACCELERATORS)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available: use --accelerator cpu or auto")
    return torch.device(name)


def describe(device: torch.device) -> dict[str, Any]:
    """Versions and hardware."""
    return {
        "versions": {
            "fedhen": VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "safetensors": safetensors.__version__,
        },
        "hardware": {
            "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
