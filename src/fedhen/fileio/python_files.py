"""Loads what a user's own Python file defines: a method, a family, data or a task, named as path/to/file.py:NAME."""

from __future__ import annotations

import importlib.util
import sys
from hashlib import sha256
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import TypeVar

from fedhen.errors import ConfigError, FedhenError, one_line

T = TypeVar("T")


def is_reference(name: str) -> bool:
    """Returns whether a name is path/to/file.py:NAME."""
    return ".py:" in name


def resolve_reference(name: str) -> str:
    """Returns path/to/file.py:NAME with an absolute path, which serves from any folder."""
    path, _, attribute = name.rpartition(":")
    return f"{Path(path).resolve()}:{attribute}"


def refuse_reference(name: str, kind: str) -> None:
    """Raises a FedhenError if a configuration names a Python file: only what the user passes is executed."""
    if is_reference(name):
        raise ConfigError(
            f"this run's {kind} was {name}: pass it again with --{kind} {quote(name)}, or from Python as {kind}=..."
        )


class PythonFiles:
    """The Python files that one command is given. Each is executed once, whatever is loaded from it."""

    def __init__(self) -> None:
        self._modules: dict[Path, ModuleType] = {}

    def load(self, name: str, kind: str, wanted: type[T]) -> T:
        """Returns what a file defines under a name. `kind` says in errors what it is."""
        path, _, attribute = name.rpartition(":")
        module = self._execute(Path(path), kind)
        found = getattr(module, attribute, None)
        if not isinstance(found, wanted):
            names = [known for known, value in vars(module).items() if isinstance(value, wanted)]
            raise ConfigError(f"{path} defines no {kind} {attribute!r}: it defines {', '.join(names) or 'none'}")
        return found

    def make(self, name: str, kind: str, wanted: type[T]) -> T:
        """Does the same as `load`, and calls a function or class of that name to make it."""
        path, _, attribute = name.rpartition(":")
        found = getattr(self._execute(Path(path), kind), attribute, None)
        if isinstance(found, wanted) or not callable(found):
            return self.load(name, kind, wanted)
        try:
            made = found()
        except Exception as error:
            raise _explain(f"{path}:{attribute} fails", error) from error
        if not isinstance(made, wanted):
            raise ConfigError(
                f"{path}:{attribute} returned {type(made).__name__}: it must return a fedhen.{wanted.__name__}"
            )
        return made

    def _execute(self, path: Path, kind: str) -> ModuleType:
        place = path.resolve()
        if place not in self._modules:
            self._modules[place] = _import_file(path, kind)
        return self._modules[place]


def _import_file(path: Path, kind: str) -> ModuleType:
    place = path.resolve()
    # Two files of the same name are two modules.
    name = f"fedhen_own_{place.stem}_{sha256(str(place).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None or not place.is_file():
        raise ConfigError(f"{path} does not exist: name your {kind} as path/to/file.py:NAME")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up here, and a file may import its neighbours, as a script does.
    sys.modules[name] = module
    if str(place.parent) not in sys.path:
        sys.path.append(str(place.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _explain(f"{path} cannot be imported", error) from error
    return module


def _explain(what: str, error: Exception) -> FedhenError:
    cause = "" if isinstance(error, FedhenError) else f"{type(error).__name__}: "
    return FedhenError(f"{what}: {cause}{one_line(str(error))}")
