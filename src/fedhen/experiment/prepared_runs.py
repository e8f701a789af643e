"""Plays runs one after the other: the way from jobs to rounds that the command line and Python share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedhen.algorithm.sampling import Activate
from fedhen.devices.population import Population
from fedhen.distributed import process_group
from fedhen.distributed.communicator import Ranks
from fedhen.experiment.build import OwnParts, build_populations, start_experiment
from fedhen.experiment.choices import Job
from fedhen.experiment.experiment import Experiment, Step
from fedhen.experiment.observed import play_observed
from fedhen.experiment.resume import NEW_RUN, ResumePolicy
from fedhen.hardware.accelerator import choose_device
from fedhen.interrupts import StopRequest
from fedhen.runs.records import ACCURACY, MetricInfo
from fedhen.tasks import Task
from fedhen.tasks.registry import describe_metrics
from fedhen.tracking.console import Display, make_display
from fedhen.tracking.observers import Callback, Observer
from fedhen.tracking.trackers import Track, make_observers


@dataclass(frozen=True)
class Play:
    """A run that is ready: whoever iterates over it plays its rounds."""

    name: str
    experiment: Experiment
    folder: Path | None
    """Its folder; without one nothing is written."""
    observers: Sequence[Observer] = ()
    policy: ResumePolicy = NEW_RUN
    stop: StopRequest | None = None

    def __iter__(self) -> Generator[Step]:
        return play_observed(self.folder, self.experiment, self.observers, self.policy, self.stop, name=self.name)


@dataclass(frozen=True)
class PreparedRuns:
    """Jobs that were checked, with the data and the models of each."""

    jobs: Sequence[Job]
    populations: Sequence[Population]
    ranks: Ranks
    activate: Activate | None = None
    observe: Callable[[], Sequence[Observer]] = tuple
    """Makes the trackers and callbacks of a run."""

    def make_display(self, quiet: bool = False, lines: bool = True) -> Display:
        """Returns what shows the progress of the runs."""
        # All jobs of a command have the same task.
        metric = next((primary_metric(population.task) for population in self.populations), ACCURACY)
        rounds = {job.name: job.config.rounds for job in self.jobs}
        return make_display(rounds, metric, quiet or self.ranks.rank > 0, lines)

    def play(
        self,
        folders: Callable[[], Iterable[Path]] | None,
        display: Display,
        policy: ResumePolicy = NEW_RUN,
        stop: StopRequest | None = None,
    ) -> Iterator[Play]:
        """Yields each run when the one before is done. `folders` creates the folders and is called on rank 0 only.

        Whoever takes the runs must not keep them: each holds the last models of all its devices.
        """
        places = (folder for make in [folders] if make is not None for folder in make())
        for job, population in zip(self.jobs, self.populations, strict=True):
            experiment = start_experiment(population, activate=self.activate, ranks=self.ranks)
            folder = None if folders is None else Path(self.ranks.first(lambda: str(next(places))))
            yield Play(job.name, experiment, folder, [display, *self.observe()], policy, stop)
            del experiment


def prepare_runs(
    jobs: Sequence[Job],
    *,
    accelerator: str = "auto",
    data_dir: Path | None = None,
    own: OwnParts | None = None,
    fit: bool = False,
    activate: Activate | None = None,
    track: Track = (),
    callbacks: Iterable[Callback] = (),
    has_folder: bool = True,
) -> PreparedRuns:
    """Loads data, builds models and checks that all of it fits together, before anything is written.

    With `fit`, data that comes split decides the number of devices.
    """
    ranks = process_group.join(choose_device(accelerator))
    observe = partial(make_observers, track, [*callbacks], has_folder)
    observe()
    chosen = [(job.config, job.method) for job in jobs]
    populations = list(build_populations(chosen, accelerator, data_dir, own, fit))
    return PreparedRuns(jobs, populations, ranks, activate, observe)


def primary_metric(task: Task) -> MetricInfo:
    return MetricInfo(**describe_metrics(task)[0])
