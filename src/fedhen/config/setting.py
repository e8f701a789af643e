"""A setting: a field of a configuration's section, with its default, its meaning and its bounds."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(
    default: Any,
    doc: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """Returns a dataclass field for a setting: its default, its meaning (`doc`) and its bounds."""
    metadata = {"doc": doc, "least": least, "above": above, "most": most, "below": below}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)
