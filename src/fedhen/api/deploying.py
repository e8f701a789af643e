"""From runs to devices: exports, early exits and predictions of a run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedhen.api.saved import PathLike
from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.data.dataset import Data
from fedhen.data.digests import compute_digest
from fedhen.data.inputs import take
from fedhen.data.raw import read_raw
from fedhen.data.spec import DTYPES, DataSpec
from fedhen.data.storage import data_root
from fedhen.deploy.capture import Flat
from fedhen.deploy.cascade import cut, run_stages
from fedhen.deploy.check import make_reference
from fedhen.deploy.confidence import CONFIDENCES, confidence_of
from fedhen.deploy.exit_file import ExitFile, write_exits
from fedhen.deploy.exit_study import DEFAULT, study_exits
from fedhen.deploy.export import export_models
from fedhen.deploy.out_folder import PYTHON
from fedhen.deploy.runtime import Answer, Arrays, check_inputs
from fedhen.deploy.source import Normalise, Source, TierModel
from fedhen.deploy.split import count_stages
from fedhen.errors import ConfigError, FedhenError, unknown_name
from fedhen.experiment.build import OwnParts
from fedhen.experiment.device_models import make_device_model
from fedhen.experiment.saved_data import load_data_again, restore_normalisation
from fedhen.experiment.saved_models import open_models, refuse_incomplete
from fedhen.models.family import Family
from fedhen.models.model_files import build_ready_module
from fedhen.models.registry import make_family
from fedhen.runs.folders import find_config
from fedhen.tasks import Task
from fedhen.tasks.predictions import Prediction
from fedhen.tasks.registry import make_task

if TYPE_CHECKING:
    from fedhen.deploy.manifest import Manifest


def export(
    run: PathLike,
    out: PathLike | None = None,
    *,
    to: str = "onnx",
    tier: str | None = None,
    of: str = "server",
    at: str = "last",
    device: int | None = None,
    int8: bool = False,
    threshold: float | str | None = None,
    tolerance: float = 1.0,
    overwrite: bool = False,
    force: bool = False,
    family: Family | None = None,
    data: Data | None = None,
    task: Task | None = None,
    data_dir: PathLike | None = None,
) -> Manifest:
    """Exports a run's models to files that devices run, each compared with the model in its runtime before it is named.

    Args:
        run: A run folder.
        out: Where to write, by default `export` in the run folder, `export-executorch` for ExecuTorch, and
            `export-device7` for a device.
        to: "onnx" or "executorch".
        tier: The only tier to export. By default all are.
        of: "server", or "devices" for the average of all devices' last models.
        at: "last", or "best" for the round in which each model was best.
        device: In place of the other three, the number of a device of a run with personal models: its own model,
            checked on its own test data.
        int8: Whether to write int8 files beside those in float.
        threshold: The cascade's: a number from 0 to 1, "never", or "auto". By default 0.9.
        tolerance: How many points an int8 file may score below the model.
        overwrite: Whether to replace the export that is in `out`.
        force: The old name of `overwrite`.
        family, data, task: What the run was trained with, if it was passed from Python.
    """
    folder = Path(run)
    refuse_choice(device, tier, of, at)
    source = make_source(folder, of, at, device=device, family=family, data=data, task=task, data_dir=data_dir)
    place = Path(out) if out is not None else default_folder(folder, to, device)
    options: dict[str, Any] = {"int8": int8, "threshold": threshold, "tolerance": tolerance}
    return export_models(source, place, to=to, tier=tier, overwrite=overwrite or force, words=PYTHON, **options)


def default_folder(run: Path, target: str, device: int | None = None) -> Path:
    """Returns where an export of a run is written, if no other place is given."""
    parts = ["export", *([target] if target != "onnx" else []), *([f"device{device}"] if device is not None else [])]
    return run / "-".join(parts)


def refuse_choice(device: int | None, tier: str | None = None, of: str = "server", at: str = "last") -> None:
    """Refuses a device together with what chooses another model."""
    if device is not None and (tier is not None or of != "server" or at != "last"):
        raise ConfigError("a device has one model, the last: leave out tier, of and at")


def study(
    run: PathLike,
    *,
    family: Family | None = None,
    data: Data | None = None,
    task: Task | None = None,
    data_dir: PathLike | None = None,
) -> ExitFile:
    """Studies the early exits of the server's last model, and writes what it finds into the run folder, for reports.

    Raises a FedhenError if no cascade can be made of the model.
    """
    source = make_source(Path(run), family=family, data=data, task=task, data_dir=data_dir)
    model = source.models[-1]
    if not source.has_test or source.targets is None:
        raise FedhenError("there is no test data to study the exits on")
    confidence = confidence_of(source.task.name)
    captured, stages = cut(model.module, source.sample, source.prepare)
    operations = dict(zip(model.exits, count_stages(stages, captured), strict=True))
    outputs = make_reference(model, source).outputs
    found = study_exits(source.task, outputs, source.targets, operations, confidence)
    result = ExitFile(round=model.round, study=found)
    try:
        write_exits(Path(run), result)
    except OSError as error:
        warnings.warn(f"{run} gets no exits.json, so reports will not show this: {error.strerror}", stacklevel=2)
    return result


def predict_raw(source: Source, raw: Any, tier: str | None, threshold: float | None) -> list[Prediction]:
    """Predicts raw inputs as `SavedModel.predict` reads them."""
    assert source.spec is not None
    batch = read_raw(source.spec, raw)
    arrays = {record.name: each.numpy() for record, each in zip(source.inputs, batch.tensors, strict=True)}
    answer = predict_source(source, check_inputs(arrays, source.inputs), tier, threshold)
    found = source.task.interpret(torch.from_numpy(answer.output), source.spec.class_names, batch.lengths)
    return [replace(each, exit=exit) for each, exit in zip(found, answer.exits, strict=True)]


def predict_source(source: Source, arrays: Arrays, tier: str | None, threshold: float | None) -> Answer:
    """Predicts raw inputs in torch. Without a tier, deeper stages run only on the examples that are not sure."""
    tensors = [torch.from_numpy(array) for array in arrays.values()]
    known = [model.tier for model in source.models]
    if tier is not None and tier not in known:
        raise unknown_name("tier", tier, known)
    model = source.models[known.index(tier) if tier is not None else -1]
    if threshold is not None or (tier is None and len(model.exits) > 1 and source.task.name in CONFIDENCES):
        try:
            captured, stages = cut(model.module, source.sample, source.prepare)
        except FedhenError:
            if threshold is not None:
                raise
        else:
            values = dict(zip(captured.inputs, tensors, strict=True))
            confidence = confidence_of(source.task.name)
            output, exits = run_stages(stages, values, DEFAULT if threshold is None else threshold, confidence)
            return Answer(output.numpy(), [model.exits[place] for place in exits.tolist()])
    with torch.no_grad():
        output = Flat(model.module, source.prepare, source.sample)(*tensors)[-1]
    return Answer(output.numpy(), [model.exits[-1]] * len(output))


def make_source(
    folder: Path,
    of: str = "server",
    at: str = "last",
    *,
    device: int | None = None,
    family: Family | None = None,
    data: Data | None = None,
    task: Task | None = None,
    data_dir: PathLike | None = None,
) -> Source:
    """Reads what is exported from a run folder: the models of all tiers, and the data that files are checked on."""
    if device is not None:
        return make_device_source(folder, device, OwnParts(family, data, task), data_dir)
    config, models, spec = _read_models(folder, of, at, family)
    data = data or load_data_again(folder, config, data_dir)
    return _describe_source(config, models, data, task, spec, of, _describe_rounds(models))


def make_source_to_predict(folder: Path, own: OwnParts, data_dir: PathLike | None = None) -> Source:
    """Reads what predictions need from a run folder: the models, and what inputs are. The data need not be there."""
    config, models, spec = _read_models(folder, "server", "last", own.family)
    if spec is None:
        # Of a run from before inputs were described.
        return make_source(folder, family=own.family, data=own.data, task=own.task, data_dir=data_dir)
    blank = [torch.zeros(2, *each.shape, dtype=DTYPES[each.dtype]) for each in spec.inputs]
    names = [each.name for each in spec.inputs]
    sample = dict(zip(names, blank, strict=True)) if all(names) else tuple(blank) if len(blank) > 1 else blank[0]
    scale = spec.inputs[0].normalisation
    return Source(
        models,
        own.task or make_task(config.task),
        sample=sample,
        prepare=None if scale is None else Normalise(scale),
        classes=spec.class_names,
        spec=spec,
    )


def _read_models(
    folder: Path, of: str, at: str, family: Family | None
) -> tuple[Config, list[TierModel], DataSpec | None]:
    found = open_models(folder)
    refuse_incomplete(found.config)
    if found.unfinished:
        warnings.warn(found.unfinished, stacklevel=4)
    models = []
    for tier in found.config.tiers:
        saved = found.read(tier, of, at)
        if family is None:
            saved.check_size()
            family = make_family(found.config, saved.inputs, saved.classes)
        held = tuple(name for name in family.exits(tier) if name in saved.exits)
        module = build_ready_module(family, tier, saved.weights, saved.exits)
        models.append(TierModel(tier, module, held, compute_digest([*saved.weights.values()]), saved.round))
    return found.config, models, saved.card.data


def make_device_source(folder: Path, device: int, own: OwnParts, data_dir: PathLike | None = None) -> Source:
    """Returns the model of a device as what is exported, with the device's own data in place of all."""
    config = toml.read_toml(find_config(folder))
    found = make_device_model(folder, device, own, data_root(Path(data_dir) if data_dir else None))
    digest = compute_digest([*found.module.state_dict().values()])
    model = TierModel(found.tier, found.module.eval(), tuple(found.card.exits), digest, found.round)
    data, training = found.data, torch.from_numpy(found.data.shards[device])
    tests = torch.from_numpy(data.test_shards[device]) if data.test_shards else torch.arange(0)
    data = replace(
        data,
        **{"x": take(data.x, training), "y": data.y[training]},
        **{"x_test": take(data.x_test, tests), "y_test": data.y_test[tests], "shards": (), "test_shards": ()},
    )
    return _describe_source(config, [model], data, own.task, found.card.data, f"device {device}", str(found.round))


def _describe_source(
    config: Config,
    models: Sequence[TierModel],
    data: Data,
    task: Task | None,
    spec: DataSpec | None,
    whose: str,
    rounds: str,
) -> Source:
    normalisation, has_test = restore_normalisation(data, spec).normalisation, len(data.y_test) > 0
    described = {} if normalisation is None else {"mean": normalisation.mean, "std": normalisation.std}
    about = {"recipe": config.recipe, "method": config.method, "seed": config.seed, "rounds": rounds}
    return Source(
        models,
        task or make_task(config.task),
        sample=take(data.x, slice(2)),
        test=data.x_test if has_test else None,
        targets=data.y_test if has_test else None,
        training=data.x,
        prepare=None if normalisation is None else Normalise(normalisation),
        normalisation=described,
        classes=spec.class_names if spec else (),
        spec=spec,
        run={**about, "models": whose},
    )


def _describe_rounds(models: Sequence[TierModel]) -> str:
    """Returns the round of the models, or that of each tier if they are the best of different rounds."""
    rounds = {model.tier: model.round for model in models}
    each = [f"{tier} {number}" for tier, number in rounds.items()]
    return ", ".join(each) if len({*rounds.values()}) > 1 else str(next(iter(rounds.values())))
