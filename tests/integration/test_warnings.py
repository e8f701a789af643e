"""A warning that a test does not expect fails the test: `filterwarnings` in pyproject.toml."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import fedhen
from support.families import texts, words


def test_a_warning_of_the_package_is_an_error() -> None:
    settings: dict[str, Any] = {"rounds": 1, "devices": {"active": 8}, "training": {"epochs": 1}}
    with pytest.raises(UserWarning, match="a device failed and is left out"):
        fedhen.train(words(), texts([2]), accelerator="cpu", **settings)


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_whichever_module_it_is_attributed_to(level: int) -> None:
    """With `stacklevel=2` a warning is attributed to the caller, which may be a test or a module of pytest's."""
    with pytest.raises(UserWarning, match="mine"):
        warnings.warn("mine", stacklevel=level)
