"""fedhen from Python: train your own models on your own data, resume after a crash, load and score saved runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedhen.algorithm.methods import Method, load_method
from fedhen.algorithm.sampling import Activate
from fedhen.config import settings as configuration
from fedhen.config import toml, validation
from fedhen.config.settings import OWN
from fedhen.data import sources
from fedhen.data.dataset import Data
from fedhen.data.storage import data_root
from fedhen.devices.population import check_exit, check_task
from fedhen.distributed import process_group
from fedhen.engines.scoring import Pass, Scoring
from fedhen.errors import UserError, unknown_name
from fedhen.experiment import build
from fedhen.experiment import experiment as experiments
from fedhen.experiment.resume import ResumePolicy
from fedhen.experiment.runner import play_run
from fedhen.fileio.python_files import refuse_reference
from fedhen.hardware.accelerator import choose_device
from fedhen.hardware.precision import FULL
from fedhen.hardware.threads import threads_per_worker, torch_threads
from fedhen.models.family import Family
from fedhen.models.image_layout import apply_image_layout
from fedhen.models.model_files import build_ready_module, read_model
from fedhen.models.registry import make_family
from fedhen.reports import write_report
from fedhen.runs.folders import create_run_folders, find_config, refuse_fleet_run
from fedhen.runs.layout import MODEL_OWNERS
from fedhen.runs.reader import read_run
from fedhen.tasks import Task
from fedhen.tasks.registry import describe_task, make_task

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Trained:
    """The result of a training: its rounds and its models."""

    experiment: experiments.Experiment
    rounds: list[dict[str, Any]]
    """A record for each round, as in `rounds.jsonl`."""
    folder: Path | None

    @property
    def accuracy(self) -> dict[str, dict[str, float]]:
        """The final accuracies: kind (server, devices) -> tier -> share of the test set."""
        if "accuracy" not in self.metrics:
            known = ", ".join(self.metrics) or "none, since there is no test data"
            raise UserError(f"this run has no accuracies: its metrics are {known}; see `metrics`")
        return self.metrics["accuracy"]

    @property
    def metrics(self) -> dict[str, dict[str, dict[str, float]]]:
        """The final metrics: name -> kind (server, devices) -> tier -> value."""
        final = self.rounds[-1]
        accuracy = {"accuracy": final["accuracy"]} if "accuracy" in final else {}
        return {**accuracy, **final.get("metrics", {})}

    def model(self, tier: str, kind: str = "server") -> nn.Module:
        """Returns the trained model of a tier. Its outputs are the logits of its exits, shallowest first."""
        family, held = self.experiment.population.family, self.experiment.population.holdings
        if tier not in held:
            raise unknown_name("tier", tier, held)
        return build_ready_module(
            family,
            tier,
            self.experiment.complete_models()[_check_kind(kind, self.experiment.config)][tier],
            held[tier].exits,
        )


def train(
    family: Family,
    data: Data,
    /,
    method: str | Method = "fedhen",
    *,
    task: str | Task | Mapping[str, Any] = "classification",
    initial: PathLike | Mapping[str, Tensor] | None = None,
    out: PathLike | None = None,
    accelerator: str = "auto",
    activate: Activate | None = None,
    force: bool = False,
    **settings: Any,
) -> Trained:
    """Trains a family of nested models on data that is split over devices.

    Args:
        family: The nested models, one for each tier.
        data: Training and test data. They are split over the devices unless they come with a split.
        method: The name of a method, a file as `file.py:NAME`, or a `Method`.
        task: What the models predict: the name of a task, its settings as a mapping, or a `fedhen.Task`.
        initial: Weights to start from, all or some, by name: a mapping, or the path of a safetensors file.
        out: A folder to write the run to, for reports and `fedhen.load`. Nothing is written without it.
        accelerator: "auto", "cpu" or "cuda".
        activate: A function that chooses the active devices: (round, last reported loss of each device) -> devices.
        force: Whether to replace the run that is in `out`.
        settings: Settings of the configuration: `rounds=20, seed=1, devices={"active": 5}, training={"lr": 0.05}`.
            Tiers have equal shares of the devices unless `tiers={"simple": 0.8, "complex": 0.2}` sets others.
    """
    chosen = load_method(method) if isinstance(method, str) else method
    own = configuration.Config(
        data=configuration.DataConfig(name=OWN),
        model=configuration.ModelConfig(family=OWN),
        tiers={tier: 1 / len(family.tiers) for tier in family.tiers},
        devices=_make_devices(len(data.shards)),
    )
    own = validation.from_mapping(chosen.settings(own), own)
    described = describe_task(task) if isinstance(task, Task) else {"name": task} if isinstance(task, str) else task
    if isinstance(initial, Mapping):
        family = family.start_from(initial)
    start = "" if initial is None else OWN if isinstance(initial, Mapping) else os.fspath(initial)
    own = replace(own, model=replace(own.model, initial=start))
    given = {**settings, "method": chosen.name, "task": described}
    config = chosen.keep_tiers(validation.from_mapping(given, own))
    ranks = process_group.join(choose_device(accelerator))
    experiment = build.build_experiment(
        config,
        data=data,
        family=family,
        method=chosen,
        task=task if isinstance(task, Task) else None,
        activate=activate,
        accelerator=accelerator,
        ranks=ranks,
    )
    if out is None:
        return Trained(experiment, [step.record for step in experiment.play()], None)
    folder = Path(ranks.first(lambda: str(create_run_folders(Path(out), [""], force)[0])))
    return Trained(experiment, [step.record for step in play_run(folder, experiment)], folder)


def resume(
    run: PathLike,
    /,
    *,
    family: Family | None = None,
    data: Data | None = None,
    method: Method | None = None,
    task: Task | None = None,
    initial: Mapping[str, Tensor] | None = None,
    activate: Activate | None = None,
    rounds: int | None = None,
    accelerator: str = "auto",
    data_dir: PathLike | None = None,
    restart: bool = False,
) -> Trained:
    """Resumes an interrupted run after its last checkpoint, or adds rounds to a finished one.

    If the family, the data, the method or `activate` was passed from Python, the same must be passed again. On a CPU
    the result has the same bytes as that of a run without the interruption. With `restart` the run starts again at
    round 1; without it, a run whose checkpoints are all damaged is refused.
    """
    folder = Path(run)
    refuse_fleet_run(folder)
    ranks = process_group.join(choose_device(accelerator))
    # Rank 0 reads the folder, because the other ranks may not see it.
    config = toml.parse_toml(ranks.first(lambda: toml.to_toml(toml.read_toml(find_config(folder)))))
    config = config if rounds is None else validation.from_mapping({"rounds": rounds}, config)
    if method is None:
        refuse_reference(config.method_file, "method")
    if initial is not None and family is not None:
        family = family.start_from(initial)
    experiment = build.build_experiment(
        config,
        data=data,
        family=family,
        method=method,
        task=task,
        activate=activate,
        accelerator=accelerator,
        data_dir=Path(data_dir) if data_dir else None,
        ranks=ranks,
    )
    for _ in play_run(folder, experiment, ResumePolicy(resume=True, restart=restart)):
        pass
    if not experiment.reported:
        kinds = MODEL_OWNERS if config.evaluation.devices else MODEL_OWNERS[1:]
        experiment.reported = {k: {t: read_model(folder, k, t).weights for t in config.tiers} for k in kinds}
    return Trained(experiment, ranks.first(lambda: [record.to_dict() for record in read_run(folder).rounds]), folder)


def load(run: PathLike, tier: str, kind: str = "server", *, family: Family | None = None) -> nn.Module:
    """Loads the trained model of a tier from a run folder.

    `kind` is "server", or "devices" for the average of all devices' last models. If the run was trained with a family
    from Python, the same family must be passed.
    """
    folder = Path(run)
    config = toml.read_toml(find_config(folder))
    if tier not in config.tiers:
        raise unknown_name("tier", tier, config.tiers)
    saved = read_model(folder, _check_kind(kind, config), tier)
    if family is None:
        saved.check_size()
        family = make_family(config, saved.inputs, saved.classes)
    return build_ready_module(family, tier, saved.weights, saved.exits)


def evaluate(
    run: PathLike,
    *,
    family: Family | None = None,
    data: Data | None = None,
    task: Task | None = None,
    accelerator: str = "auto",
    data_dir: PathLike | None = None,
) -> dict[str, dict[str, float]]:
    """Scores the saved models of a run again. Returns kind -> tier -> the primary metric; accuracy as a share."""
    folder = Path(run)
    config = toml.read_toml(find_config(folder))
    data = data or sources.load_data(config.data, data_root(Path(data_dir) if data_dir else None), config.seed)
    task = task or make_task(config.task)
    if not len(data.y_test):
        raise UserError("there is no test data to score the models on")
    build.check_named_task(task, config)
    check_task(task, data, config)
    data = data.to(choose_device(accelerator))
    batch_size = config.evaluation.batch_size
    scores: dict[str, dict[str, float]] = {
        kind: {} for kind in MODEL_OWNERS if config.evaluation.devices or kind == "server"
    }
    for kind in scores:
        for tier in config.tiers:
            saved = read_model(folder, kind, tier)
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
            scores[kind][tier] = found[task.scores[0].name]
    return scores


def report(*runs: PathLike, out: PathLike) -> str:
    """Writes tables, curves and a page about runs into `out`. Returns the tables as text."""
    return write_report([read_run(Path(run)) for run in runs], Path(out)).text


def _make_devices(number: int) -> configuration.DevicesConfig:
    """Returns the devices that the data is split over, or the paper's. At most the paper's number is active."""
    paper = configuration.DevicesConfig()
    return configuration.DevicesConfig(number, min(number, paper.active)) if number else paper


def _check_kind(kind: str, config: configuration.Config) -> str:
    if kind not in MODEL_OWNERS:
        raise unknown_name("kind of model", kind, MODEL_OWNERS)
    if kind == "devices" and not config.evaluation.devices:
        raise UserError("the run kept no average of all devices (evaluation.devices = false): use kind 'server'")
    return kind
