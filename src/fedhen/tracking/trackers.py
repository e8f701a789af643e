"""The trackers by name."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedhen.errors import ConfigError, unknown_name
from fedhen.tracking.observers import Callback, CallbackObserver, Observer, RunEnd, RunInfo, describe
from fedhen.tracking.tracker import Tracker

Track = str | Iterable[str | Observer]
"""Names of trackers, also several separated by commas, and own observers."""


@dataclass(frozen=True)
class Kind:
    """A tracker's class, and the packages that it needs: all of one of the lists."""

    sink: str
    packages: tuple[Sequence[str], ...]

    @property
    def is_installed(self) -> bool:
        return any(all(map(_is_installed, packages)) for packages in self.packages)


TRACKERS = {
    "tensorboard": Kind("TensorBoard", (["tensorboardX"], ["tensorboard", "torch"])),
    "mlflow": Kind("MLflow", (["mlflow", "sqlalchemy"],)),
    "wandb": Kind("Wandb", (["wandb"],)),
    "trackio": Kind("Trackio", (["trackio"],)),
}


def check_track(track: Track, option: str = "track") -> list[str | Observer]:
    """Returns names and observers one by one. Raises a ConfigError if one is unknown or its package is missing."""
    found: list[str | Observer] = []
    for each in [track] if isinstance(track, str) else track:
        found += [name.strip() for name in each.split(",") if name.strip()] if isinstance(each, str) else [each]
    for name in found:
        if isinstance(name, str):
            _check_name(name, option)
    return [each for place, each in enumerate(found) if each not in found[:place]]


def make_tracker(name: str) -> Tracker:
    module = importlib.import_module(f"fedhen.tracking.{name}")
    return Tracker(name, getattr(module, TRACKERS[name].sink)())


class UntilFailure(Observer):
    """Passes everything on to a tracker until it fails. Then it warns in one line, and the run continues without it."""

    def __init__(self, observer: Observer, name: str) -> None:
        self.observer, self.name, self.failed, self.advice = observer, name, False, ""

    def start(self, run: RunInfo) -> None:
        self.failed = False
        if isinstance(self.observer, Tracker):
            self.advice = f"; log it later with: fedhen log {run.folder} --to {self.name}"
        self._try(lambda: self.observer.start(run))

    def round(self, record: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        self._try(lambda: self.observer.round(record, timing))

    def end(self, run: RunEnd) -> None:
        self._try(lambda: self.observer.end(run))

    def _try(self, act: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            act()
        except Exception as error:
            self.failed = True
            why = f"{self.name} has failed ({describe(error)}): the run continues without it{self.advice}"
            warnings.warn(why, stacklevel=2)


def make_observers(track: Track = (), callbacks: Iterable[Callback] = (), has_folder: bool = True) -> list[Observer]:
    """Returns the observers of one run: trackers, none of which can end it, and then callbacks, which can."""
    trackers: list[Observer] = []
    for each in check_track(track):
        if isinstance(each, str):
            if not has_folder:
                raise ConfigError(f"track={each!r} needs a run folder: pass one to write the run to")
            trackers.append(UntilFailure(make_tracker(each), each))
        else:
            trackers.append(UntilFailure(each, type(each).__name__))
    return [*trackers, *map(CallbackObserver, callbacks)]


def _check_name(name: str, option: str) -> None:
    if name not in TRACKERS:
        raise unknown_name("tracker", name, TRACKERS)
    if not TRACKERS[name].is_installed:
        raise ConfigError(f"{option} {name} needs: pip install 'fedhen[{name}]'")


def _is_installed(package: str) -> bool:
    # A folder in the working directory, as wandb/, counts as a package without an origin.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
