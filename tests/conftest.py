"""For all tests: one thread each, since two workers share the machine, one seed, and one profile for property tests."""

from __future__ import annotations

import os

# Before torch is imported, here and in the processes that tests start: nets this small only wait for a second thread.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Before Triton is imported, as parts of torch may do: without a GPU its kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

# The first call of torch is slow: a deadline would measure that alone.
settings.register_profile("fedhen", deadline=None)
settings.load_profile("fedhen")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws does not depend on those before it."""
    torch.manual_seed(0)
