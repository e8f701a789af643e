"""Saved runs from Python: their models, their scores and reports on them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedhen.data.dataset import Data
from fedhen.data.storage import data_root
from fedhen.devices.population import check_exit, check_task
from fedhen.engines.scoring import Pass, Scoring
from fedhen.errors import ConfigError, DataError
from fedhen.experiment import build
from fedhen.experiment.build import OwnParts
from fedhen.experiment.device_models import make_device_model
from fedhen.experiment.saved_data import load_data_again, restore_normalisation
from fedhen.experiment.saved_models import open_models, refuse_incomplete
from fedhen.hardware.accelerator import choose_device
from fedhen.hardware.precision import FULL
from fedhen.hardware.threads import threads_per_worker, torch_threads
from fedhen.models.family import Family
from fedhen.models.image_layout import apply_image_layout
from fedhen.models.loaded_model import LoadedModel
from fedhen.models.model_files import build_ready_module
from fedhen.models.registry import make_family
from fedhen.profiles.reading import parse_measured, read_profile, take_measured
from fedhen.reports import AUTO, report_folders
from fedhen.reports.targets import RequestedTargets
from fedhen.runs.layout import MODEL_OWNERS
from fedhen.tasks import Task
from fedhen.tasks.registry import make_task

PathLike = str | os.PathLike[str]
Targets = str | Mapping[str, str | float | Sequence[float]] | None


def load(
    run: PathLike,
    tier: str | None = None,
    of: str = "server",
    at: str = "last",
    *,
    device: int | None = None,
    family: Family | None = None,
    data: Data | None = None,
    task: Task | None = None,
    data_dir: PathLike | None = None,
    kind: str | None = None,
) -> LoadedModel:
    """Loads the trained model of a tier, or of a device, from a run folder, also while the run is played.

    The result is a module, with `predict` for raw inputs. Its `round` is an attribute.

    Args:
        run: The run folder. Of a run that is not finished, the models are those of its newest checkpoint.
        tier: The tier.
        of: "server", or "devices" for the average of all devices' last models.
        at: "last", or "best" for the round in which this model was best.
        device: In place of the other three, the number of a device of a run with personal models: its own model, made
            of the newest checkpoint and adapted to its training data as for its scores.
        family: The run's family, if it was passed from Python.
        data: The run's data, if it was passed from Python; only for the model of a device.
        task: The run's task, if it was passed from Python; predictions are those of its `interpret`.
        data_dir: The folder of downloaded data, likewise. By default $FEDHEN_DATA.
        kind: The old name of `of`.
    """
    if (tier is None) == (device is None):
        raise ConfigError("load needs a tier or a device: fedhen.load(run, 'simple') or fedhen.load(run, device=7)")
    if device is not None:
        root = data_root(Path(data_dir) if data_dir else None)
        found = make_device_model(Path(run), device, OwnParts(family, data, task), root)
        return LoadedModel(found.module, found.card, task, found.round)
    assert tier is not None
    models = open_models(Path(run))
    refuse_incomplete(models.config)
    if models.unfinished:
        warnings.warn(models.unfinished, stacklevel=2)
    saved = models.read(tier, kind or of, at)
    if family is None:
        saved.check_size()
        family = make_family(models.config, saved.inputs, saved.classes)
    module = build_ready_module(family, tier, saved.weights, saved.exits)
    return LoadedModel(module, saved.card, task, saved.round)


class Scores(dict[str, dict[str, float]]):
    """Owner ("devices" or "server") -> tier -> the primary metric; accuracy as a share."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: dict[str, dict[str, int]] = {}
        """Owner -> tier -> the round of the model; 0 if that is not known."""


def evaluate(
    run: PathLike,
    *,
    of: str | None = None,
    at: str = "last",
    family: Family | None = None,
    data: Data | None = None,
    task: Task | None = None,
    accelerator: str = "auto",
    data_dir: PathLike | None = None,
) -> Scores:
    """Scores the models of a run again, also while it is played. `of` and `at` choose them, as in `load`."""
    models = open_models(Path(run))
    refuse_incomplete(models.config)
    config = models.config
    if models.unfinished:
        warnings.warn(models.unfinished, stacklevel=2)
    data = data or load_data_again(Path(run), config, data_dir)
    task = task or make_task(config.task)
    if not len(data.y_test):
        raise DataError("there is no test data to score the models on")
    build.check_named_task(task, config)
    check_task(task, data, config)
    data = data.to(choose_device(accelerator))
    batch_size = config.evaluation.batch_size
    scores = Scores()
    owners = MODEL_OWNERS if config.evaluation.devices else MODEL_OWNERS[1:]
    for owner in owners if of is None else (of,):
        scores[owner], scores.rounds[owner] = {}, {}
        for tier in config.tiers:
            saved = models.read(tier, owner, at)
            data = restore_normalisation(data, saved.card.data)
            if family is None:
                saved.check_size()
                family = make_family(config, data.shape, saved.classes)
            inputs, targets = data.to(torch.device("cpu")).in_type_of(family.build(tier)).sample()
            family.check(inputs, partial(check_exit, task, targets, data.classes or saved.classes))
            module = build_ready_module(family, tier, saved.weights, saved.exits).to(data.device)
            fitting = data.in_type_of(module)
            module = apply_image_layout(module, fitting.sample()[0], FULL, config.training.batch_size)
            with torch_threads(threads_per_worker(config.runtime)):
                found = Scoring({tier: module}, fitting, task, batch_size).evaluate(Pass(tier, {}))
            scores[owner][tier], scores.rounds[owner][tier] = found[task.scores[0].name], saved.round
    return scores


def report(
    *runs: PathLike,
    out: PathLike | None = None,
    targets: Targets = None,
    of: str | None = None,
    rounds: int | None = None,
    profile: PathLike | None = None,
    measured: str | None = None,
) -> str:
    """Writes tables, curves and a page about runs. Returns the tables as text.

    Args:
        runs: Run folders, or folders that contain them.
        out: Where to write: by default into the only folder that is given, else into a new one under runs/.
        targets: Each tier's targets in the unit of the metric, like `{"simple": [92, 90], "complex": "auto"}`, or
            "auto" for every tier. By default those of the runs' settings.
        of: Whose models: "devices" for the average of all devices, the default if all runs keep it, or "server".
        rounds: Use only the first rounds of each run.
        profile: Add hours and joules by a profile of devices: "phones", "mixed", "sensors", or a file ending in .toml.
        measured: The seconds that a device of a class of the profile needs to train a tier's model for one round, like
            "slow:simple=310". All speeds of the profile are scaled to fit.
    """
    if measured is not None and profile is None:
        raise ConfigError("measured needs a profile")
    found = read_profile(os.fspath(profile)) if profile is not None else None
    if found is not None and measured is not None:
        found = take_measured(found, parse_measured(measured))
    return report_folders(
        [Path(run) for run in runs],
        Path(out) if out is not None else None,
        targets=_read_targets(targets),
        owner=of,
        rounds=rounds,
        profile=found,
        skip=partial(warnings.warn, stacklevel=3),
    ).text


def _read_targets(given: Any) -> RequestedTargets:
    """Returns each tier's targets as reports take them: numbers, or none where the rule chooses."""
    if given is None or given == AUTO:
        return AUTO if given else None
    try:
        each = {tier: [v] if isinstance(v, str | float | int) else [*v] for tier, v in given.items()}
        return {tier: [] if values == [AUTO] else [*map(float, values)] for tier, values in each.items()}
    except (AttributeError, TypeError, ValueError):
        example = f"{{'simple': [92, 90]}} or {AUTO!r}"
        raise ConfigError(f"targets is {given!r}: give numbers by tier, like {example}") from None
