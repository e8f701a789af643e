"""Quantities with a unit and, if it is known, a range: "22 GFLOP/s", "22 (6 to 82) GFLOP/s"."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from fedhen.errors import ConfigError, unknown_name

Bound = Literal["low", "typical", "high"]
_NUMBER = r"([+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
_QUANTITY = re.compile(rf"{_NUMBER}\s*(?:\({_NUMBER}\s+to\s+{_NUMBER}\)\s*)?(\S.*)?")

SPEED = {"MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12}
"""Units of arithmetic, in operations a second."""
JOULES_AN_OPERATION = {"J/GFLOP": 1e-9, "mJ/GFLOP": 1e-12, "J/TFLOP": 1e-12, "pJ/FLOP": 1e-12, "nJ/FLOP": 1e-9}
RATE = {"kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6, "kB/s": 1e3, "MB/s": 1e6}
"""Units of a link, in bytes a second."""
JOULES_A_BYTE = {"J/MB": 1e-6, "mJ/MB": 1e-9, "J/GB": 1e-9, "nJ/bit": 8e-9, "uJ/bit": 8e-6}
POWER = {"uW": 1e-6, "mW": 1e-3, "W": 1.0}
TIME = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Quantity:
    """A number in basic units (operations, bytes, joules, watts, seconds), and the range that its sources give."""

    typical: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Quantity:
        """Returns a quantity without a range."""
        return cls(value, value, value)

    def at(self, bound: Bound) -> float:
        """Returns the typical value, or an end of the range."""
        return {"low": self.low, "typical": self.typical, "high": self.high}[bound]

    def times(self, factor: float) -> Quantity:
        """Returns the quantity and its range times a factor."""
        return Quantity(self.typical * factor, self.low * factor, self.high * factor)


ZERO = Quantity.exactly(0.0)


def parse_quantity(text: object, units: dict[str, float], key: str, *, positive: bool = False) -> Quantity:
    """Parses a quantity in one of these units. Raises a ConfigError that names the key."""
    found = _QUANTITY.fullmatch(text.strip()) if isinstance(text, str) else None
    example = next(iter(units))
    if found is None:
        raise ConfigError(
            f'{key} = {text!r}: write a number and a unit, like "22 {example}" or "22 (6 to 82) {example}"'
        )
    unit = (found[4] or "").strip()
    if not unit:
        raise ConfigError(f"{key} = {text!r}: it has no unit: add one of {', '.join(units)}")
    if unit not in units:
        raise unknown_name(f"unit in {key}", unit, units)
    typical, low, high = (float(found[k] if found[k] is not None else found[1]) * units[unit] for k in (1, 2, 3))
    if not all(map(math.isfinite, (typical, low, high))):
        raise ConfigError(f"{key} = {text!r}: it must be a finite number")
    if min(typical, low) < 0 or (positive and not min(typical, low) > 0):
        raise ConfigError(f"{key} = {text!r}: it must {'be above 0' if positive else 'not be negative'}")
    if not low <= typical <= high:
        raise ConfigError(f"{key} = {text!r}: its range must contain it, the lower end first")
    return Quantity(typical, low, high)


def parse_seconds(text: str, key: str) -> float:
    """Parses a time above 0 with a unit; without one, in seconds."""
    with suppress(ValueError):
        text = f"{float(text)!r} s"
    return parse_quantity(text, TIME, key, positive=True).typical
