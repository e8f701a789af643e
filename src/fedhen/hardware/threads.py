"""The CPU cores that this process may use, and the number of torch threads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedhen.config.runtime_settings import RuntimeConfig

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Returns the number of cores that the affinity and the CPU quota of this process allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota(_own_groups()))))


def cores_per_rank() -> int:
    """Returns the usable cores divided by the ranks that torchrun started on this machine."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def threads_per_worker(runtime: RuntimeConfig) -> int:
    """Returns the torch threads of one worker."""
    return runtime.threads or cores_per_rank()


def worker_count(runtime: RuntimeConfig) -> int:
    """Returns the number of workers: as configured, or enough to keep all cores busy."""
    return runtime.workers or max(1, cores_per_rank() // threads_per_worker(runtime))


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Sets the number of torch threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _own_groups() -> str:
    try:
        return Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return ""


def _quota(groups: str, root: Path = CGROUPS) -> float:
    """Returns the smallest CPU quota of the process's control groups, infinite without one."""
    least = math.inf
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one unnamed tree, version 1 a tree for each set of controllers.
        trees = [root] if not controllers else [root / controllers] * ("cpu" in controllers.split(","))
        for tree in trees:
            own = tree / path.lstrip("/")
            # In a container its own group may be the root of the tree, so that the path does not exist.
            for folder in (own, *own.parents):
                if folder.is_relative_to(tree):
                    least = min(least, _quota_in(folder))
    return least


def _quota_in(folder: Path) -> float:
    def read(name: str) -> list[str]:
        try:
            return (folder / name).read_text(encoding="ascii").split()
        except OSError:
            return []

    quota, period = (read("cpu.max") or [*read("cpu.cfs_quota_us"), *read("cpu.cfs_period_us")] or ["max", "1"])[:2]
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
