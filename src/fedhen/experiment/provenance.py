"""Describes the environment of a run for its folder: versions and hardware."""

from __future__ import annotations

import platform
from typing import Any

import numpy
import safetensors
import torch

from fedhen.config.runtime_settings import RuntimeConfig
from fedhen.distributed.communicator import ALONE, Ranks
from fedhen.hardware.threads import threads_per_worker, usable_cores, worker_count
from fedhen.version import VERSION


def versions() -> dict[str, str]:
    """Returns the versions of everything that the results depend on."""
    return {
        "fedhen": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
    }


def describe_environment(device: torch.device, runtime: RuntimeConfig, ranks: Ranks = ALONE) -> dict[str, Any]:
    return {
        "versions": versions(),
        "hardware": {
            "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cpu": _cpu_name(),
            "cores": usable_cores(),
            "workers": worker_count(runtime) if runtime.engine == "fast" and device.type == "cpu" else 1,
            "threads": threads_per_worker(runtime),
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
