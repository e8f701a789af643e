"""Marks for the parameters of tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_is_quick(parameters: Iterable[Any]) -> list[Any]:
    """Marks all but the first as slow: `make quick` tests one of a kind."""
    first, *rest = parameters
    slow = [each if isinstance(each, tuple) else (each,) for each in rest]
    return [first, *(pytest.param(*each, marks=pytest.mark.slow) for each in slow)]
