"""What the functions that train are asked for: arguments and settings from Python become jobs, and jobs are played."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedhen.algorithm.methods import Method
from fedhen.algorithm.sampling import Activate
from fedhen.api.result import Models, Run
from fedhen.config.recipes import load_recipe, take_data
from fedhen.config.settings import Config
from fedhen.config.validation import from_mapping
from fedhen.data.dataset import FederatedData
from fedhen.devices.workload import measure_workload
from fedhen.errors import ConfigError, DataError
from fedhen.experiment.build import OwnParts
from fedhen.experiment.choices import Choice, Job, choose, fit_own_parts, name_own_parts, names_devices
from fedhen.experiment.experiment import Experiment, Step
from fedhen.experiment.prepared_runs import Play, PreparedRuns, prepare_runs
from fedhen.experiment.summary import Outcome, make_summary
from fedhen.fileio import untrusted
from fedhen.models.family import Family
from fedhen.runs import reader
from fedhen.runs.folders import PYTHON, create_run_folders
from fedhen.runs.records import RoundRecord, Summary, Timing, parse_record
from fedhen.seeds import SECRET_BYTES
from fedhen.tasks import Task
from fedhen.tasks.registry import describe_metrics
from fedhen.tracking.console import Display
from fedhen.tracking.observers import Callback
from fedhen.tracking.trackers import Track

PathLike = str | os.PathLike[str]
OPTIONS = ("accelerator", "activate", "data_dir", "progress", "callbacks", "track")
"""Arguments that a plan takes as they are."""


@dataclass(frozen=True)
class Plan:
    """A recipe, the user's own parts, and the settings that the user changes."""

    source: Config | Path
    settings: Mapping[str, Any]
    own: OwnParts = field(default_factory=OwnParts)
    data: Path | None = None
    """The user's own data, if it is a file or a folder."""
    run_dir: Path | None = None
    overwrite: bool = False
    accelerator: str = "auto"
    activate: Activate | None = None
    data_dir: PathLike | None = None
    progress: bool = True
    callbacks: Iterable[Callback] = ()
    track: Track = ()

    def choose(self, method: str | Method | None) -> Choice:
        """Returns the configuration of a method, by default the recipe's."""
        if not isinstance(method, str | Method | None):
            raise ConfigError(f"method is {_kind(method)}: pass the name of a method, or a fedhen.Method")
        return choose(self.source, method, self._change, start=partial(fit_own_parts, own=self.own))

    def _change(self, config: Config) -> Config:
        config = config if self.data is None else take_data(config, self.data)
        return from_mapping(self.settings, name_own_parts(config, self.own))

    def prepare(self, jobs: Sequence[Job]) -> PreparedRuns:
        """Checks the jobs, before anything is written."""
        file = untrusted.read_toml(self.source) if isinstance(self.source, Path) else {}
        return prepare_runs(
            jobs,
            accelerator=self.accelerator,
            data_dir=Path(self.data_dir) if self.data_dir else None,
            own=self.own,
            fit=not names_devices(self.settings) and not names_devices(file),
            activate=self.activate,
            track=self.track,
            callbacks=self.callbacks,
            has_folder=self.run_dir is not None,
        )

    def start(self, jobs: Sequence[Job]) -> tuple[Display, Iterator[Play]]:
        """Returns the display of the runs, and each run when the one before is done. Everything is checked before."""
        runs, run_dir = self.prepare(jobs), self.run_dir
        shown = runs.make_display(quiet=not self.progress, lines=False)
        if run_dir is None:
            return shown, runs.play(None, shown)
        names = [job.folder for job in jobs]
        return shown, runs.play(lambda: create_run_folders(run_dir, names, self.overwrite, PYTHON), shown)

    def begin(self, method: str | Method | None) -> Rounds:
        """Returns the rounds of one run, which are played as they are taken."""
        choice = self.choose(method)
        shown, (play,) = self.start([Job(choice.config.method, "", *choice)])
        return Rounds(play, shown)


class Rounds(Iterator[dict[str, Any]]):
    """Iterates over the rounds of a run while it is played: each is played when its record is asked for.

    `close`, or the end of a `with` block, saves the last round and lets go of the run folder.
    """

    def __init__(self, play: Play, shown: AbstractContextManager[object]) -> None:
        self._play, self._steps = play, _play_within(play, shown)
        self._rounds: list[dict[str, Any]] = []
        self._timing: list[dict[str, Any]] = []

    def __next__(self) -> dict[str, Any]:
        step = next(self._steps)
        self._rounds.append(step.record)
        self._timing.append({"round": step.record["round"], **step.timing})
        return step.record

    def close(self) -> None:
        """Saves the last round, so that the run can be resumed."""
        self._steps.close()

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def run(self) -> Run:
        """The run as far as it is played."""
        return make_run(self._play.experiment, self._rounds, self._timing, self._play.folder)

    def finish(self) -> Run:
        """Plays the rounds that are left."""
        for _ in self:
            pass
        return self.run


def _play_within(play: Play, shown: AbstractContextManager[object]) -> Generator[Step]:
    with shown:
        yield from play


def make_plan(
    source: object, arguments: Mapping[str, Any], family: Family | None = None, data: FederatedData | None = None
) -> Plan:
    """Makes a plan of the arguments of a function of the API. Those that are not options are settings."""
    settings = {name: value for name, value in arguments.items() if value is not None}
    old, initial = settings.pop("out", None), settings.pop("initial", None)
    run_dir = settings.pop("run_dir", old)
    overwrite = any([settings.pop("force", False), settings.pop("overwrite", False)])
    family, path = check_family(settings.pop("family")) if "family" in settings else family, None
    if isinstance(settings.get("data"), FederatedData):
        data = settings.pop("data")
    elif isinstance(settings.get("data"), str | os.PathLike):
        path = Path(settings.pop("data"))
    task = settings.pop("task") if isinstance(settings.get("task"), Task) else None
    secret = check_secret(settings.pop("secret", b""))
    own = OwnParts(family, data, task, initial if isinstance(initial, Mapping) else None, secret)
    if isinstance(settings.get("task"), str):
        settings["task"] = {"name": settings["task"]}
    if initial is not None and own.initial is None:
        settings["model"] = {"initial": os.fspath(initial), **_list_settings(settings.get("model", {}))}
    if data is not None and data.shards and not names_devices(settings):
        # The data decides the number of devices, also if a whole section is given.
        devices = _list_settings(settings.get("devices", {}))
        settings["devices"] = {name: value for name, value in devices.items() if name != "number"}
    options = {name: settings.pop(name) for name in OPTIONS if name in settings}
    return Plan(_find_source(source), settings, own, path, run_dir and Path(run_dir), overwrite, **options)


def _list_settings(section: Any) -> Any:
    """Returns the settings of a section that may be an object."""
    return vars(section) if is_dataclass(section) else section


def _find_source(recipe: object) -> Config | Path:
    if isinstance(recipe, Config):
        return recipe
    if not isinstance(recipe, str | os.PathLike):
        raise ConfigError(f"the recipe is {_kind(recipe)}: pass a name like 'digits', a TOML file, or a fedhen.Config")
    path = Path(recipe)
    return path if path.suffix == ".toml" else load_recipe(str(recipe))


def check_family(family: object) -> Family:
    """Raises a ConfigError if this is not a family."""
    if not isinstance(family, Family):
        raise ConfigError(f"family is {_kind(family)}: pass a fedhen.Family, or what fedhen.nest returns")
    return family


def check_data(data: object) -> FederatedData:
    """Raises a DataError if this is not data."""
    if not isinstance(data, FederatedData):
        raise DataError(
            f"data is {_kind(data)}: pass fedhen.FederatedData, as fedhen.FederatedData.from_arrays(x, y) makes it"
        )
    return data


def check_secret(secret: object) -> bytes:
    """Raises a ConfigError if this is not a secret, or none."""
    if not isinstance(secret, bytes) or len(secret) not in (0, SECRET_BYTES):
        raise ConfigError(f"secret must be {SECRET_BYTES} bytes, as secrets.token_bytes({SECRET_BYTES}) draws them")
    return secret


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def make_run(
    experiment: Experiment,
    rounds: Sequence[Mapping[str, Any]],
    timing: Sequence[Mapping[str, Any]],
    folder: Path | None,
) -> Run:
    """Returns the run that an experiment has played so far, with the records and times of its rounds."""
    config, population, best, summary = experiment.config, experiment.population, experiment.best_models(), None
    if experiment.is_over or len(rounds) >= config.rounds:
        best_rounds = {owner: {tier: model.round for tier, model in tiers.items()} for owner, tiers in best.items()}
        outcome = Outcome(
            experiment.parameters(),
            measure_workload(experiment.population),
            best_rounds,
            sum(each["total"] for each in timing),
            {},
        )
        summary = make_summary(config, experiment.metrics, rounds, outcome)
    record = reader.Run(
        folder or Path(f"{config.method}-seed{config.seed}"),
        json.loads(json.dumps(asdict(config))),
        [parse_record(RoundRecord, each) for each in rounds],
        [parse_record(Timing, each) for each in timing],
        parse_record(Summary, summary) if summary else None,
        {"metrics": describe_metrics(population.task)},
    )
    last = experiment.complete_models()
    models = Models(config, last, best, experiment.cards(), population.task, experiment.reported_round)
    return Run(record, folder, population.family, models, experiment)
