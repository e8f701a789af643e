"""For all tests: one thread each, since two workers share the machine, and one profile for property tests."""

from __future__ import annotations

import os

# Before torch is imported, here and in the processes that tests start: nets this small only wait for a second thread.
os.environ["OMP_NUM_THREADS"] = "1"

from hypothesis import settings

# The first call of torch is slow: a deadline would measure that alone.
settings.register_profile("fedhen", deadline=None)
settings.load_profile("fedhen")
