"""A configuration as TOML text, and back."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedhen.config.settings import Config
from fedhen.config.validation import from_mapping, rename_settings
from fedhen.errors import UserError
from fedhen.fileio import untrusted


class Whole(dict[str, Any]):
    """A table that was given whole, and replaces the one before."""


def to_toml(config: Config, comments: bool = False) -> str:
    """Every setting, with its meaning as a comment if wanted."""
    top, sections = [], []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            lines = [
                _line(f.name, getattr(value, f.name), f.metadata["doc"] if comments else "")
                for f in dataclasses.fields(value)
            ]
            sections.append([f"[{item.name}]", *lines])
        elif isinstance(value, Mapping):
            head = [f"# {item.metadata['doc']}"] if comments else []
            sections.append([*head, f"[{item.name}]", *(_line(_key(k), v, "") for k, v in value.items())])
        else:
            top.append(_line(item.name, value, item.metadata["doc"] if comments else ""))
    return "\n\n".join("\n".join(block) for block in (top, *sections)) + "\n"


def read_toml(path: Path, base: Config | None = None) -> Config:
    """The configuration in a file, over a base."""
    try:
        values = untrusted.read_toml(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not TOML: {untrusted.describe_error(error)}") from None
    try:
        return from_mapping(rename_settings(values), base)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def parse_toml(text: str) -> Config:
    """The configuration that `to_toml` has written."""
    return from_mapping(rename_settings(tomllib.loads(text)))


def apply_settings(config: Config, assignments: Iterable[str]) -> Config:
    """The configuration with `section.key=value` applied; values are TOML, and a bare word is a string."""
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {assignment!r}: write section.key=value, like --set training.lr=0.05")
        *path, last = key.strip().split(".")
        table = changes
        for name in path:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise UserError(f"--set {assignment!r}: {name} is not a section")
        value = _parsed(text.strip())
        table[last] = Whole(value) if isinstance(value, dict) else value
    return from_mapping(_over_tables(config, changes), config)


def _over_tables(section: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """In an open table, like `tiers`, a single key changes and the others stay."""
    merged = dict(changes)
    for name, value in changes.items():
        old = getattr(section, name, None)
        if isinstance(value, dict) and isinstance(old, dict) and not isinstance(value, Whole):
            merged[name] = {**old, **value}
        elif isinstance(value, dict) and dataclasses.is_dataclass(old):
            merged[name] = _over_tables(old, value)
    return merged


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _line(key: str, value: Any, doc: str) -> str:
    return f"{key} = {format_value(value)}" + (f"  # {doc}" if doc else "")


def _key(name: str) -> str:
    return name if name.isascii() and name.replace("-", "").replace("_", "").isalnum() else json.dumps(name)


def format_value(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(k)} = {format_value(v)}' for k, v in value.items())}}}"
    # JSON's strings are TOML's, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
