"""Reads profiles: those that come with the package by name, others by the path of a TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhen.errors import ConfigError, FedhenError, unknown_name
from fedhen.fileio import untrusted
from fedhen.profiles import quantity
from fedhen.profiles.profile import Calibration, DeviceClass, Profile
from fedhen.profiles.quantity import ZERO, parse_quantity, parse_seconds

SHIPPED = Path(__file__).parent / "shipped"
QUANTITIES = {
    "speed": (quantity.SPEED, True),
    "joules": (quantity.JOULES_AN_OPERATION, False),
    "down": (quantity.RATE, True),
    "up": (quantity.RATE, True),
    "down_joules": (quantity.JOULES_A_BYTE, False),
    "up_joules": (quantity.JOULES_A_BYTE, False),
    "idle_power": (quantity.POWER, False),
}
"""Key of a class -> its units, and whether it must be above 0."""
OPTIONAL = {"idle_power": ZERO}
NUMBERS = {"share": (0.0, 1.0), "jitter": (0.0, 3.0), "availability": (0.0, 1.0), "dropout": (0.0, 1.0)}
"""Key of a class -> the least and the largest number."""


def list_shipped() -> list[str]:
    """Returns the names of the profiles that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def read_profile(name: str | Path) -> Profile:
    """Reads a profile by its name, or from a file ending in .toml."""
    path = find_profile(name)
    try:
        return _make_profile(untrusted.read_toml(path), path.stem)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except FedhenError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {untrusted.describe_error(error)}") from None


def find_profile(name: str | Path) -> Path:
    """Returns the file of a profile that is given by its name, or by the path of a file ending in .toml."""
    if Path(name).suffix == ".toml":
        return Path(name)
    if str(name) not in list_shipped():
        raise ConfigError(f"{unknown_name('profile', name, list_shipped())}; or write the path of a .toml file")
    return SHIPPED / f"{name}.toml"


def parse_measured(text: str) -> Calibration:
    """Parses "CLASS:TIER=SECONDS", one measured number."""
    place, equals, seconds = text.rpartition("=")
    name, colon, tier = place.partition(":")
    if not (equals and colon and name and tier):
        raise ConfigError(f"{text!r}: write CLASS:TIER=SECONDS, like slow:simple=310")
    return Calibration(name, tier, parse_seconds(seconds, "--measured"))


def take_measured(profile: Profile, measured: Calibration) -> Profile:
    """Returns the profile with this measured number in place of its own."""
    names = [each.name for each in profile.classes]
    if measured.device_class not in names:
        raise unknown_name(f"class of profile {profile.name}", measured.device_class, names)
    return replace(profile, calibration=measured)


def _make_profile(tree: Mapping[str, Any], name: str) -> Profile:
    _refuse_unknown(tree, ("profile", "classes", "calibration"), "")
    about = _table(tree.get("profile", {}), "profile")
    _refuse_unknown(about, ("name", "about"), "profile.")
    classes = [_make_class(key, values) for key, values in _table(tree.get("classes"), "classes").items()]
    if not classes:
        raise ConfigError("it has no [classes.NAME]: write at least one")
    total = sum(each.share for each in classes)
    if abs(total - 1) > 1e-6:
        raise ConfigError(f"the shares of its classes add up to {total:g}: they must add up to 1")
    without = [each.name for each in classes if not each.tier]
    if without and len(without) < len(classes):
        raise ConfigError(f"some of its classes have a tier, and {', '.join(without)} has none: give all of them one")
    ordered = tuple(sorted(classes, key=lambda each: each.speed.typical))
    texts = {key: _text(about[key], f"profile.{key}") for key in about}
    profile = Profile(texts.get("name", name), texts.get("about", ""), ordered)
    if "calibration" not in tree:
        return profile
    return take_measured(profile, _make_calibration(_table(tree["calibration"], "calibration")))


def _make_class(name: str, values: Any) -> DeviceClass:
    prefix = f"classes.{name}."
    table = _table(values, prefix.rstrip("."))
    _refuse_unknown(table, (*NUMBERS, *QUANTITIES, "tier"), prefix)
    for key in ("share", *QUANTITIES):
        if key not in table and key not in OPTIONAL:
            raise ConfigError(f"{prefix}{key} is missing")
    amounts = {
        key: parse_quantity(table[key], units, prefix + key, positive=positive) if key in table else OPTIONAL[key]
        for key, (units, positive) in QUANTITIES.items()
    }
    numbers = {key: _number(table[key], prefix + key, *bounds) for key, bounds in NUMBERS.items() if key in table}
    if not numbers["share"]:
        raise ConfigError(f"{prefix}share = 0: leave the class out")
    rest: dict[str, Any] = {**numbers, **amounts}
    return DeviceClass(name=name, tier=_text(table.get("tier", ""), f"{prefix}tier"), **rest)


def _make_calibration(values: Mapping[str, Any]) -> Calibration:
    keys = ("class", "tier", "seconds")
    _refuse_unknown(values, keys, "calibration.")
    for key in keys:
        if key not in values:
            raise ConfigError(f"calibration.{key} is missing")
    seconds = parse_quantity(values["seconds"], quantity.TIME, "calibration.seconds", positive=True).typical
    return Calibration(_text(values["class"], "calibration.class"), _text(values["tier"], "calibration.tier"), seconds)


def _refuse_unknown(table: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for key in table:
        if key not in known:
            raise unknown_name("key", prefix + key, [prefix + each for each in known])


def _table(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"[{key}] is missing" if value is None else f"{key} must be a table, found {value!r}")
    return value


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be a string, found {value!r}")
    return value


def _number(value: Any, key: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(f"{key} = {value!r}: it must be a number from {least:g} to {most:g}")
    return float(value)
