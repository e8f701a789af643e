"""Makes configurations from plain values, as TOML or Python has them, and checks every key and value."""

from __future__ import annotations

import dataclasses
import json
import numbers
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, Literal

from fedhen.config.settings import Config
from fedhen.errors import ConfigError, FedhenError, unknown_name

LARGEST = 2**63 - 1
"""The largest whole number that arrays can hold."""
RENAMED = {
    "objective.weights": "objective.exit_weights",
    "server.untrained": "server.untrained_weights",
    "server.label_rows": "server.rows_by_class",
    "runtime.rows": "runtime.storage",
    "runtime.rows_dir": "runtime.storage_dir",
    "fleet.deadline": "fleet.deadline_seconds",
    "fleet.enough": "fleet.answers",
    "fleet.extra": "fleet.spare_devices",
    "fleet.wait": "fleet.wait_seconds",
}
"""Old -> new names of settings. Files may have either, `--set` and Python only the new ones."""


def rename_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces the old names in a configuration that was read from a file.

    An old name is kept, to be refused later, if the file has the new one too.
    """
    renamed = dict(tree)
    for old, new in RENAMED.items():
        section, _, name = old.partition(".")
        new_name = new.partition(".")[2]
        values = renamed.get(section)
        if isinstance(values, Mapping) and name in values and new_name not in values:
            renamed[section] = {new_name if key == name else key: value for key, value in values.items()}
    return renamed


def list_settings(section: type = Config, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yields every setting with its full key, in order."""
    for item in dataclasses.fields(section):
        if dataclasses.is_dataclass(kind := type_hints(section)[item.name]):
            yield from list_settings(typing.cast(type, kind), f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item


def flatten_config(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every setting of a configuration by its full key; a table of free names is one value.

    Settings that the configuration lacks have their defaults, so that a setting added later changes nothing. Unknown
    keys are kept.
    """
    known = {key for key, _ in list_settings()}
    defaults = json.loads(json.dumps(dataclasses.asdict(Config())))
    return flatten(defaults, known) | flatten(rename_settings(tree), known)


def flatten(tree: Mapping[str, Any], kept: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Returns nested tables as one with dotted keys; tables whose keys are in `kept` stay values."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        key = prefix + name
        leaves |= flatten(value, kept, f"{key}.") if isinstance(value, Mapping) and key not in kept else {key: value}
    return leaves


@cache
def type_hints(section: type) -> Mapping[str, Any]:
    """Returns the types of a section's settings."""
    return typing.get_type_hints(section)


def from_mapping(values: Mapping[str, Any], base: Config | None = None) -> Config:
    """Makes a configuration from nested values over a base. Raises a ConfigError that names the key that is wrong.

    A section may be a table, which changes what it names, or an object like `TrainingConfig`, which replaces it whole.
    """
    base = base or Config()
    values = {name: _as_table(name, value) for name, value in values.items()} if isinstance(values, Mapping) else values
    return typing.cast(Config, _section(Config, read_tiers(values, base), base, ""))


def _as_table(name: str, value: Any) -> Any:
    """Returns a whole section that is given as an object as a table."""
    section = type_hints(Config).get(name)
    return vars(value) if dataclasses.is_dataclass(section) and isinstance(value, typing.cast(type, section)) else value


def read_tiers(values: Any, base: Config) -> Any:
    """Returns the values with tiers as shares, if they are counts of devices, or a list with each device's tier.

    The list itself becomes `devices.tiers`.
    """
    if not isinstance(values, Mapping) or "tiers" not in values:
        return values
    tiers, devices = values["tiers"], values.get("devices", {})
    number = devices.get("number", base.devices.number) if isinstance(devices, Mapping) else None
    if not isinstance(number, numbers.Integral):
        return values
    if isinstance(tiers, list | tuple):
        for tier in tiers:
            if not isinstance(tier, str) or tier not in base.tiers:
                raise unknown_name("tier in tiers", tier, base.tiers)
        if len(tiers) != number:
            raise ConfigError(f"tiers lists {len(tiers)} devices, and devices.number={number}: they must agree")
        counts = {tier: tiers.count(tier) for tier in base.tiers if tier in tiers}
        values = {**values, "devices": {**devices, "tiers": tiers}}
    elif are_counts(tiers):
        counts = tiers
        if sum(counts.values()) != number:
            raise ConfigError(
                f"tiers counts {sum(counts.values())} devices, and devices.number={number}: they must agree, "
                "or give shares that add up to 1"
            )
    else:
        return values
    return {**values, "tiers": {tier: count / int(number) for tier, count in counts.items()}}


def are_counts(tiers: Any) -> bool:
    """Returns whether a table has a whole number for each tier. A single tier with 1 has a share."""
    whole = isinstance(tiers, Mapping) and all(
        isinstance(each, numbers.Integral) and not isinstance(each, bool) and int(each) > 0 for each in tiers.values()
    )
    return whole and sum(tiers.values()) > 1


def _section(section: type, values: Any, base: Any, prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.')} must be a table, found {_toml_type(values)}")
    fields, kinds, changes = {f.name: f for f in dataclasses.fields(section)}, type_hints(section), {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in fields:
            raise _unknown_setting(key, [prefix + n for n in fields])
        if dataclasses.is_dataclass(kinds[name]):
            changes[name] = _section(typing.cast(type, kinds[name]), value, getattr(base, name), f"{key}.")
        else:
            changes[name] = _value(kinds[name], value, key)
            _check_bounds(fields[name].metadata, changes[name], key)
    return dataclasses.replace(base, **changes)


def _unknown_setting(key: str, here: list[str]) -> FedhenError:
    if key in RENAMED:
        return ConfigError(f"{key} is now {RENAMED[key]}")
    elsewhere = [full for full, _ in list_settings() if full.rpartition(".")[2] == key.rpartition(".")[2]]
    if elsewhere:
        return ConfigError(f"unknown setting {key!r}: did you mean {elsewhere[0]!r}?")
    return unknown_name("setting", key, here)


def _check_bounds(bounds: Mapping[str, Any], value: Any, key: str) -> None:
    if bounds["least"] is not None and not value >= bounds["least"]:
        raise ConfigError(f"{key} = {value} is too small: it must be at least {bounds['least']}")
    if bounds["above"] is not None and not value > bounds["above"]:
        raise ConfigError(f"{key} = {value} is too small: it must be above {bounds['above']}")
    if bounds["most"] is not None and not value <= bounds["most"]:
        raise ConfigError(f"{key} = {value} is too large: it must be at most {bounds['most']}")
    if bounds["below"] is not None and not value < bounds["below"]:
        raise ConfigError(f"{key} = {value} is too large: it must be below {bounds['below']}")


def _value(kind: Any, value: Any, key: str) -> Any:
    """Returns the value as that type, or raises a ConfigError."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value not in args:
            raise unknown_name(f"value of {key}", value, args)
        return value
    if origin in (typing.Union, types.UnionType):
        return _either(args, value, key)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{key} must be a list, found {_toml_type(value)}")
        return tuple(_value(args[0], item, key) for item in value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a table, found {_toml_type(value)}")
        return {str(name): _value(args[1], item, f"{key}.{name}") for name, item in value.items()}
    return _scalar(kind, value, key)


def _scalar(kind: type, value: Any, key: str) -> Any:
    # numpy's numbers are numbers too; a bool is a number to Python alone.
    if kind in (int, float) and not isinstance(value, bool):
        if isinstance(value, numbers.Integral):
            value = int(value)
        if kind is float and isinstance(value, numbers.Real):
            try:
                value = float(value)
            except OverflowError:
                value = float("inf")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{key} must be {_NAMES[kind]}, found {_toml_type(value)} {value!r}")
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise ConfigError(f"{key} must be a finite number, found {value}")
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        raise ConfigError(f"{key} is a number of {len(str(abs(value)))} digits: it must be at most {LARGEST}")
    return value


def _either(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    for kind in kinds:
        try:
            return _value(kind, value, key)
        except FedhenError:
            continue
    raise ConfigError(f"{key} must be {' or '.join(_type_name(kind) for kind in kinds)}, found {value!r}")


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def _type_name(kind: Any) -> str:
    return " or ".join(map(repr, typing.get_args(kind))) if typing.get_origin(kind) is Literal else _NAMES[kind]


def _toml_type(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a table"
    return "a list" if isinstance(value, list | tuple) else _NAMES.get(type(value), type(value).__name__)
