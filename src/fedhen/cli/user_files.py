"""Families, data and tasks that commands load from a user's Python files."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from fedhen.config.data_settings import OWN
from fedhen.config.settings import Config
from fedhen.config.toml import parse_value
from fedhen.config.validation import are_counts, from_mapping
from fedhen.errors import ConfigError
from fedhen.fileio import untrusted
from fedhen.fileio.python_files import PythonFiles, is_reference, resolve_reference

if TYPE_CHECKING:
    from fedhen.experiment.build import OwnParts

KEYS = {"family": "model.family", "data": "data.name", "task": "task.name"}
"""Option -> the setting that names the same."""


def add_own_parts(command: argparse.ArgumentParser) -> None:
    """Adds the options for a family and a task of the user's own."""
    command.add_argument(
        "--family", metavar="FILE.py:NAME", help="your own model family, or a function that returns one"
    )
    command.add_argument("--task", metavar="TASK", help="what models predict, by name, or your own as FILE.py:NAME")


def add_own_parts_again(command: argparse.ArgumentParser) -> None:
    """Adds the options for a run's own family, data and task, which are never loaded because its folder names them."""
    add_own_parts(command)
    command.add_argument("--data", metavar="FILE.py:NAME", help="your own data, or a function that returns it")


def find_reference(options: argparse.Namespace, part: str) -> str:
    """Returns the Python file that an option names for a family, data or a task, or "" if it names none."""
    name = getattr(options, part, None) or ""
    for setting in getattr(options, "settings", []):
        key, _, value = setting.partition("=")
        if key.strip() == KEYS[part] and is_reference(value):
            name = str(parse_value(value.strip()))
    return name if is_reference(name) else ""


def find_files(options: argparse.Namespace) -> PythonFiles:
    """Returns the Python files of this command."""
    if not hasattr(options, "python_files"):
        options.python_files = PythonFiles()
    files: PythonFiles = options.python_files
    return files


def load_own_parts(options: argparse.Namespace) -> OwnParts:
    """Returns the family, the data and the task that the options name, and the secret, made once for each command."""
    from fedhen.data.dataset import Data
    from fedhen.experiment.build import OwnParts
    from fedhen.models.family import Family
    from fedhen.tasks import Task

    if not hasattr(options, "own_parts"):
        named, files = {part: find_reference(options, part) for part in KEYS}, find_files(options)
        options.own_parts = OwnParts(
            family=files.make(named["family"], "family", Family) if named["family"] else None,
            data=files.make(named["data"], "data", Data) if named["data"] else None,
            task=files.make(named["task"], "task", Task) if named["task"] else None,
            secret=getattr(options, "secret", b""),
        )
    parts: OwnParts = options.own_parts
    return parts


def prepare_own_parts(config: Config, options: argparse.Namespace) -> Config:
    """Returns a recipe with the tiers of the user's own family, and the devices of the user's own data."""
    if not any(find_reference(options, part) for part in KEYS):
        return config
    from fedhen.experiment.choices import fit_own_parts

    return fit_own_parts(config, load_own_parts(options))


def name_own_parts(config: Config, options: argparse.Namespace) -> Config:
    """Returns the configuration with the names of the user's own family, data and task."""
    if family := getattr(options, "family", None):
        config = from_mapping({"model": {"family": family}}, config)
    if named := getattr(options, "task", None):
        config = from_mapping({"task": {"name": named}}, config)
    if name := find_reference(options, "family"):
        config = replace(config, model=replace(config.model, family=resolve_reference(name)))
    if name := find_reference(options, "data"):
        config = replace(config, data=replace(config.data, name=resolve_reference(name)))
    if name := find_reference(options, "task"):
        from fedhen.config.data_settings import OWN
        from fedhen.tasks.registry import describe_task

        task = load_own_parts(options).task
        assert task is not None
        described = describe_task(task)
        if described["name"] == OWN:
            described["name"] = resolve_reference(name)
        config = from_mapping({"task": described}, config)
    return config


def fits_devices(options: argparse.Namespace) -> bool:
    """Returns whether data that comes split decides the number of devices: unless the user has given it."""
    from fedhen.experiment.choices import names_devices

    if not getattr(options, "fits_devices", False):
        return False
    given = dict(setting.split("=", 1) for setting in options.settings if "=" in setting)
    tiers = parse_value(given.get("tiers", "").strip())
    if "devices.number" in {key.strip() for key in given} or isinstance(tiers, list) or are_counts(tiers):
        return False
    if options.config is None:
        return True
    return not names_devices(untrusted.read_toml(options.config))


def check_again(options: argparse.Namespace, config: Config) -> None:
    """Refuses options that are not the run's own: --data that is a path, a family or a task that it does not name."""
    for part, named in (("family", config.model.family), ("task", config.task.name)):
        given = getattr(options, part)
        if given is None or (named == OWN and is_reference(given)):
            # What was passed from Python has no name, so that any file may define it.
            continue
        if (resolve_reference(given) if is_reference(given) else given) != named:
            if named == OWN:
                raise ConfigError(f"--{part} {given}: the run's {part} was passed from Python: name it as FILE.py:NAME")
            raise ConfigError(f"--{part} {given}: the run's {part} is {named}")
    if options.data is not None and not is_reference(options.data):
        raise ConfigError(
            f"--data {options.data}: name data of your own as FILE.py:NAME; other data is found by itself"
        )
