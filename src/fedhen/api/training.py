"""Training from Python: your own models on your own data, recipes, and runs that are resumed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack, overload

from torch import Tensor

from fedhen.algorithm.methods import Method, load_method
from fedhen.algorithm.sampling import Activate
from fedhen.api.plans import PathLike, Rounds, check_data, check_family, make_plan, make_run
from fedhen.api.result import Run
from fedhen.config import toml, validation
from fedhen.config.data_settings import DataConfig, TaskConfig
from fedhen.config.keywords import Settings, Table, TrainSettings
from fedhen.config.settings import Config
from fedhen.data.dataset import FederatedData
from fedhen.distributed import process_group
from fedhen.experiment.build import OwnParts
from fedhen.experiment.choices import Job
from fedhen.experiment.prepared_runs import prepare_runs
from fedhen.experiment.resume import ResumePolicy
from fedhen.experiment.saved_models import open_models
from fedhen.fileio.python_files import refuse_reference
from fedhen.hardware.accelerator import choose_device
from fedhen.models.family import Family
from fedhen.runs.folders import find_config, refuse_fleet_run
from fedhen.runs.layout import MODEL_OWNERS
from fedhen.runs.private import read_secret
from fedhen.runs.reader import read_run
from fedhen.tasks import Task
from fedhen.tracking.observers import Callback
from fedhen.tracking.trackers import Track

TaskLike = str | Task | Table | TaskConfig
Initial = PathLike | Mapping[str, Tensor]


def train(
    family: Family,
    data: FederatedData,
    /,
    method: str | Method | None = None,
    *,
    task: TaskLike | None = None,
    config: Config | None = None,
    initial: Initial | None = None,
    run_dir: PathLike | None = None,
    overwrite: bool = False,
    accelerator: str = "auto",
    activate: Activate | None = None,
    secret: bytes | None = None,
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    track: Track = (),
    **settings: Unpack[TrainSettings],
) -> Run:
    """Trains a family of nested models on data that is split over devices.

    Args:
        family: The nested models, one for each tier.
        data: Training and test data. They are split over the devices unless they come with a split.
        method: The name of a method, a file as `file.py:NAME`, or a `Method`. By default `fedhen`.
        task: What the models predict: the name of a task, its settings, or a `fedhen.Task`. By default classification.
        config: The settings as a whole. `settings` change it.
        initial: Weights to start from, all or some, by name: a mapping, or the path of a safetensors file.
        run_dir: A folder to write the run to, for reports and `fedhen.load`. Nothing is written without it.
        overwrite: Whether to replace the run that is in `run_dir`.
        accelerator: "auto", "cpu" or "cuda".
        activate: A function that chooses the active devices: (round, last reported loss of each device) -> devices.
        secret: 32 bytes from which the random choices of server and devices follow in place of the seed, as in a fleet.
        progress: Whether to show the progress in a terminal or a notebook.
        callbacks: Functions that are called with each round's record. One that raises ends the run, which is saved.
        track: Trackers to log to: "tensorboard", "mlflow", "wandb", "trackio", or a `fedhen.Observer`.
        settings: Settings of the configuration. A section is a table, which changes what it names, or an object, which
            replaces the section: `rounds=20, devices={"active": 5}, training=fedhen.TrainingConfig(lr=0.05)`.
            Tiers have equal shares of the devices unless `tiers={"simple": 0.8, "complex": 0.2}` sets others.
    """
    options: dict[str, Any] = {
        **{"task": task, "initial": initial, "run_dir": run_dir, "overwrite": overwrite},
        **{"accelerator": accelerator, "activate": activate, "secret": secret},
        **{"progress": progress, "callbacks": callbacks, "track": track},
    }
    return _begin_training(family, data, method, config=config, **settings, **options).finish()


def run(
    recipe: str | PathLike | Config,
    /,
    method: str | Method | None = None,
    *,
    family: Family | None = None,
    data: FederatedData | PathLike | Table | DataConfig | None = None,
    task: TaskLike | None = None,
    initial: Initial | None = None,
    run_dir: PathLike | None = None,
    overwrite: bool = False,
    accelerator: str = "auto",
    activate: Activate | None = None,
    secret: bytes | None = None,
    data_dir: PathLike | None = None,
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    track: Track = (),
    **settings: Unpack[Settings],
) -> Run:
    """Plays a recipe, as `fedhen run` does.

    Args:
        recipe: The name of a recipe, a TOML file, as `config.toml` of a run folder is, or a `fedhen.Config`.
        method: The name of a method, a file as `file.py:NAME`, or a `Method`. By default the recipe's.
        family: Your own models in place of the recipe's.
        data: Your own data in place of the recipe's: `FederatedData`, or the path of a folder, an .npz file or a table.
            A table of settings changes the recipe's data.
        task: What the models predict, if that is not the recipe's task.
        data_dir: The folder of downloaded data. By default $FEDHEN_DATA.
        initial, run_dir, overwrite, accelerator, activate, secret, progress, callbacks, track, settings: As in
            `fedhen.train`.
    """
    options: dict[str, Any] = {
        **{"family": family, "data": data, "task": task, "initial": initial},
        **{"run_dir": run_dir, "overwrite": overwrite, "accelerator": accelerator, "activate": activate},
        **{"secret": secret},
        **{"progress": progress, "callbacks": callbacks, "track": track},
    }
    return _begin_recipe(recipe, method, data_dir=data_dir, **settings, **options).finish()


@overload
def rounds(
    family: Family,
    data: FederatedData,
    /,
    method: str | Method | None = None,
    *,
    task: TaskLike | None = None,
    config: Config | None = None,
    initial: Initial | None = None,
    run_dir: PathLike | None = None,
    overwrite: bool = False,
    accelerator: str = "auto",
    activate: Activate | None = None,
    secret: bytes | None = None,
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    track: Track = (),
    **settings: Unpack[TrainSettings],
) -> Rounds: ...


@overload
def rounds(
    recipe: str | PathLike | Config,
    /,
    method: str | Method | None = None,
    *,
    family: Family | None = None,
    data: FederatedData | PathLike | Table | DataConfig | None = None,
    task: TaskLike | None = None,
    initial: Initial | None = None,
    run_dir: PathLike | None = None,
    overwrite: bool = False,
    accelerator: str = "auto",
    activate: Activate | None = None,
    secret: bytes | None = None,
    data_dir: PathLike | None = None,
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    track: Track = (),
    **settings: Unpack[Settings],
) -> Rounds: ...


def rounds(recipe: Any, /, *given: Any, **arguments: Any) -> Rounds:
    """Iterates over the rounds of a run while it is played: yields each round's record, as in `rounds.jsonl`.

    The arguments are those of `fedhen.train`, or those of `fedhen.run`. The run itself is the attribute `run`. At the
    end of the `with` block the last round is saved in `run_dir`, so that the run can be resumed.

    Example:
        Stop when the loss is low::

            with fedhen.rounds("digits", rounds=100) as rounds:
                for record in rounds:
                    if record["loss"] < 0.5:
                        break
            simple = rounds.run.model("simple")
    """
    begin: Any = _begin_recipe if isinstance(recipe, str | os.PathLike | Config) else _begin_training
    started: Rounds = begin(recipe, *given, **arguments)
    return started


def _begin_training(
    family: Family, data: FederatedData, /, method: Any = None, *, config: Config | None = None, **arguments: Any
) -> Rounds:
    return make_plan(config or Config(), arguments, check_family(family), check_data(data)).begin(method)


def _begin_recipe(recipe: object, /, method: Any = None, **arguments: Any) -> Rounds:
    return make_plan(recipe, arguments).begin(method)


def resume(
    run: PathLike,
    /,
    *,
    family: Family | None = None,
    data: FederatedData | None = None,
    method: str | Method | None = None,
    task: Task | None = None,
    initial: Mapping[str, Tensor] | None = None,
    activate: Activate | None = None,
    rounds: int | None = None,
    stop: Mapping[str, Any] | None = None,
    accelerator: str = "auto",
    data_dir: PathLike | None = None,
    restart: bool = False,
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
    track: Track = (),
) -> Run:
    """Resumes an interrupted run after its last checkpoint, or adds rounds to a finished one.

    If the family, the data, the method or `activate` was passed from Python, the same must be passed again. On a CPU
    the result has the same bytes as that of a run without the interruption. `stop` changes when the run stops by
    itself: `{"patience": 0, "until": {}}` turns that off. With `restart` the run starts again at round 1; without it, a
    run whose checkpoints are all damaged is refused. `progress`, `callbacks` and
    `track` are those of `train`; trackers continue the run that they have.
    """
    folder = Path(run)
    refuse_fleet_run(folder)
    ranks = process_group.join(choose_device(accelerator))
    # Rank 0 reads the folder, because the other ranks may not see it.
    config = toml.parse_toml(ranks.first(lambda: toml.to_toml(toml.read_toml(find_config(folder)))))
    more = {} if rounds is None else {"rounds": rounds}
    config = validation.from_mapping({**more, "stop": stop or {}}, config)
    if method is None:
        refuse_reference(config.method_file, "method")
    chosen = method if isinstance(method, Method) else load_method(method or config.method)
    secret = bytes.fromhex(ranks.first(lambda: read_secret(folder).hex()))
    own = OwnParts(family and check_family(family), data and check_data(data), task, initial, secret)
    runs = prepare_runs(
        [Job(chosen.name, "", config, chosen)],
        accelerator=accelerator,
        data_dir=Path(data_dir) if data_dir else None,
        own=own,
        activate=activate,
        track=track,
        callbacks=callbacks,
    )
    with runs.make_display(quiet=not progress, lines=False) as shown:
        (play,) = runs.play(lambda: [folder], shown, ResumePolicy(resume=True, restart=restart))
        for _ in play:
            pass
    experiment = play.experiment
    if not experiment.reported:
        models = open_models(folder)
        owners = MODEL_OWNERS if config.evaluation.devices else MODEL_OWNERS[1:]
        experiment.reported_round = models.round
        experiment.reported = {of: {t: models.read(t, of).weights for t in config.tiers} for of in owners}
    records, timing = ranks.first(lambda: _read_rounds(folder))
    return make_run(experiment, records, timing, folder)


def _read_rounds(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    found = read_run(folder)
    return [record.to_dict() for record in found.rounds], [asdict(timing) for timing in found.timing]
