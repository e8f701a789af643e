"""For all tests: one thread, since two workers share the machine, one seed, and one profile for property tests."""

from __future__ import annotations

import os
import re
from pathlib import Path

# Before torch is imported, here and in the processes that tests start: small networks only wait for a second one.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Before Triton is imported, as parts of torch may do: without a GPU its kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

# The first call of torch is slow, and so is a loaded machine: a deadline, and how long examples take to make, would
# measure these alone.
settings.register_profile("fedhen", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fedhen")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out modules with a mark that is excluded, since some import what takes seconds, such as Flower."""
    left_out = re.findall(r"\bnot (\w+)", config.option.markexpr)
    if collection_path.suffix != ".py" or not left_out or " or " in config.option.markexpr:
        return None
    marks = re.findall(r"^pytestmark = (.*)", collection_path.read_text(encoding="utf-8"), re.MULTILINE)
    return True if any(re.search(rf"\bmark\.{name}\b", line) for name in left_out for line in marks) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Names a test's group at the end of its id, by which `--dist loadgroup` keeps a group in one process.

    xdist 3.8 writes it to an attribute that pytest 9.2 no longer reads: every process then starts fleets of its own.
    """
    for item in items if config.getoption("loadgroup", False) else []:
        for group in (f"@{mark.args[0]}" for mark in item.iter_markers("xdist_group")):
            if not item.nodeid.endswith(group):
                item._id = type(item._id).parse(item.nodeid + group)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Makes what a test draws independent of the tests before it."""
    torch.manual_seed(0)
