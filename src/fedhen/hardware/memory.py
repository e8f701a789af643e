"""Free memory, and errors that mean it has run out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from fedhen.errors import UserError

P = ParamSpec("P")


T = TypeVar("T")


OUT_OF_MEMORY = (
    "out of memory: lower training.batch_size, devices.active or evaluation.batch_size, or set runtime.storage=host"
)


SAID = ("can't allocate memory", "CUDA error: out of memory", "ALLOC_FAILED")
"""What is said where there is no error of its own for it: by torch on a CPU, by CUDA's graphs, by its libraries."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it was memory that ran out, in this error or in one that it came of."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(said in str(error) for said in SAID):
            return True
        error = error.__cause__ or error.__context__
    return False


def explain_out_of_memory(play: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """A generator that says in one line what to lower where memory runs out."""

    @wraps(play)
    def played(*args: P.args, **settings: P.kwargs) -> Iterator[T]:
        try:
            yield from play(*args, **settings)
        except Exception as error:
            if isinstance(error, UserError) or not is_out_of_memory(error):
                raise
            raise UserError(OUT_OF_MEMORY) from error

    return played


def free_memory(device: torch.device) -> int:
    """Bytes that are free there now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_meminfo(), _container())


def _meminfo() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container() -> int:
    """What is left of a container's share, where it has one: the machine's free memory does not tell."""
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="ascii") for name in ("max", "current"))
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return 2**62
