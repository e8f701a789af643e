"""Writes profiles as TOML."""

from __future__ import annotations

import json
from collections.abc import Iterator

from fedhen.profiles.profile import DeviceClass, Profile
from fedhen.profiles.quantity import Quantity
from fedhen.profiles.reading import NUMBERS, QUANTITIES

UNITS = {
    "speed": "GFLOP/s",
    "joules": "J/GFLOP",
    "down": "MB/s",
    "up": "MB/s",
    "down_joules": "J/MB",
    "up_joules": "J/MB",
    "idle_power": "W",
}


def write_profile(profile: Profile) -> str:
    """Returns the text of a profile's file. Its measured number is not written: calibrate it before."""
    about = f"[profile]\nname = {_quote(profile.name)}\nabout = {_quote(profile.about)}\n"
    return "\n".join([about, *("\n".join(_list_lines(each)) + "\n" for each in profile.classes)])


def _list_lines(of: DeviceClass) -> Iterator[str]:
    yield f"[classes.{_quote(of.name)}]"
    if of.tier:
        yield f"tier = {_quote(of.tier)}"
    for key in NUMBERS:
        yield f"{key} = {getattr(of, key)!r}"
    for key, (units, _) in QUANTITIES.items():
        yield f"{key} = {_quote(_format(getattr(of, key), UNITS[key], units[UNITS[key]]))}"


def _format(quantity: Quantity, unit: str, size: float) -> str:
    typical, low, high = (each / size for each in (quantity.typical, quantity.low, quantity.high))
    return f"{typical!r} {unit}" if low == high else f"{typical!r} ({low!r} to {high!r}) {unit}"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
