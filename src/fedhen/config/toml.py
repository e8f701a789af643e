"""Writes configurations as TOML and reads them back."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedhen.config.settings import Config
from fedhen.config.validation import from_mapping, rename_settings
from fedhen.errors import ConfigError, FedhenError
from fedhen.fileio import untrusted


def to_toml(config: Config, comments: bool = False) -> str:
    """Returns every setting as TOML, with its meaning as a comment if `comments` is true."""
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


def read_toml(path: Path, base: Config | None = None, only: Collection[str] = ()) -> Config:
    """Reads a configuration from a file. What the file leaves out, or what is not in `only`, is as in `base`."""
    try:
        values = untrusted.read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {untrusted.describe_error(error)}") from None
    try:
        values = {key: value for key, value in values.items() if key in only} if only else rename_settings(values)
        return from_mapping(values, base)
    except FedhenError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_toml(text: str) -> Config:
    """Reads a configuration from the text that `to_toml` returned."""
    return from_mapping(rename_settings(tomllib.loads(text)))


def apply_settings(config: Config, assignments: Iterable[str]) -> Config:
    """Applies `section.key=value` to a configuration; values are TOML, and a bare word is a string.

    A table of free names, like `tiers`, is replaced whole by `tiers={...}`; `tiers.simple=0.2` changes one of its keys.
    """
    tree = dataclasses.asdict(config)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {assignment!r}: write section.key=value, like --set training.lr=0.05")
        *path, last = key.strip().split(".")
        table = tree
        for name in path:
            if not isinstance(table.get(name), dict):
                table[name] = {}
            table = table[name]
        table[last] = parse_value(text.strip())
    return from_mapping(tree, config)


def parse_value(text: str) -> Any:
    """Returns a value that is written as TOML; what is not TOML is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _line(key: str, value: Any, doc: str) -> str:
    return f"{key} = {format_value(value)}" + (f"  # {doc}" if doc else "")


def _key(name: str) -> str:
    return name if name.isascii() and name.replace("-", "").replace("_", "").isalnum() else json.dumps(name)


def format_value(value: Any) -> str:
    """Returns a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(k)} = {format_value(v)}' for k, v in value.items())}}}"
    # A string in JSON is one in TOML, except for DEL, which TOML requires to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
