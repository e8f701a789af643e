"""The CPU cores that this process may use, and how many threads torch takes of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedhen.config.settings import RuntimeConfig

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The cores that this process may really use: by its affinity, and by the CPU quota of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota(_own_groups()))))


def cores_per_rank() -> int:
    """The same, shared out over the ranks that torchrun started on this machine."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def threads_per_worker(runtime: RuntimeConfig) -> int:
    """The torch threads of one worker."""
    return runtime.threads or cores_per_rank()


def worker_count(runtime: RuntimeConfig) -> int:
    """The number of workers: as configured, or as many as keep all cores busy."""
    return runtime.workers or max(1, cores_per_rank() // threads_per_worker(runtime))


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Inside, operations of torch use this many threads."""
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
    """The smallest CPU quota of the control groups that this process is in; infinite if there is none."""
    least = math.inf
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one tree without a name, version 1 one for each set of controllers.
        trees = [root] if not controllers else [root / controllers] * ("cpu" in controllers.split(","))
        for tree in trees:
            own = tree / path.lstrip("/")
            # A container may see its own group as the root of the tree: then the path leads nowhere.
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
