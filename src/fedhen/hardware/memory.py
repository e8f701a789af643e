"""Measures free memory and recognises errors that mean it has run out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from fedhen.errors import FedhenError

P = ParamSpec("P")
T = TypeVar("T")
OUT_OF_MEMORY = (
    "out of memory: lower training.batch_size, devices.active or evaluation.batch_size, or set runtime.storage=host"
)
MESSAGES = ("can't allocate memory", "CUDA error: out of memory", "ALLOC_FAILED")
"""Parts of error messages that mean the same: of torch on a CPU, of CUDA graphs, of CUDA's libraries."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether an error, or one of its causes, means that memory ran out."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in str(error) for text in MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def explain_out_of_memory(play: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Decorates a generator: out-of-memory errors become a FedhenError that says what to lower."""

    @wraps(play)
    def wrapper(*args: P.args, **settings: P.kwargs) -> Iterator[T]:
        try:
            yield from play(*args, **settings)
        except Exception as error:
            if isinstance(error, FedhenError) or not is_out_of_memory(error):
                raise
            raise FedhenError(OUT_OF_MEMORY) from error

    return wrapper


def free_memory(device: torch.device) -> int:
    """Returns the bytes that are free on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_machine_memory(), _container_memory())


def _machine_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_memory() -> int:
    """Returns what is left of a container's limit, which the machine's free memory does not include."""
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="ascii") for name in ("max", "current"))
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return 2**62
