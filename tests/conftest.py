"""For all tests: one thread, since two workers share the machine, one seed, and one profile for property tests."""

from __future__ import annotations

import os

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


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Makes what a test draws independent of the tests before it."""
    torch.manual_seed(0)
