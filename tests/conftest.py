"""One profile for all property tests: the first call of torch is slow, so that a deadline would only measure that."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fedhen", deadline=None)
settings.load_profile("fedhen")
