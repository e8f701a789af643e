"""Plays a run and tells its observers about it: the one place for the command line and for Python."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from fedhen.experiment.experiment import Experiment, Step
from fedhen.experiment.resume import NEW_RUN, ResumePolicy, flatten_settings
from fedhen.experiment.runner import play_run
from fedhen.interrupts import RunStopped, StopNow, StopRequest
from fedhen.runs.records import MetricInfo
from fedhen.tasks.registry import describe_metrics
from fedhen.tracking.observers import FAILED, FINISHED, STOPPED, Observer, RunEnd, RunInfo, read_end
from fedhen.tracking.tracker import forget_logged


def play_observed(
    folder: Path | None,
    experiment: Experiment,
    observers: Iterable[Observer] = (),
    policy: ResumePolicy = NEW_RUN,
    stop: StopRequest | None = None,
    *,
    name: str = "",
) -> Generator[Step]:
    """Plays the rounds that are left and tells the observers, on rank 0 only. Without a folder nothing is written.

    If an observer raises, or the caller takes no further rounds, the run is saved as if it were stopped.
    """
    run = _Observed(folder, experiment, observers, policy, stop or StopRequest(), name)
    try:
        with closing(run.play()) as steps:
            try:
                for step in steps:
                    run.tell_round(step)
                    yield step
            except StopNow:
                raise
            except (GeneratorExit, KeyboardInterrupt):
                run.leave(steps)
                raise
        run.tell_end(FINISHED)
    except RunStopped:
        run.tell_end(STOPPED if run.failure is None else FAILED, run.failure)
        if run.failure is not None:
            raise run.failure from None
        raise
    except StopNow:
        raise
    except (GeneratorExit, KeyboardInterrupt):
        run.tell_end(STOPPED)
        raise
    except Exception as error:
        run.tell_end(FAILED, error)
        raise


class _Observed:
    def __init__(
        self,
        folder: Path | None,
        experiment: Experiment,
        observers: Iterable[Observer],
        policy: ResumePolicy,
        stop: StopRequest,
        name: str,
    ) -> None:
        self.folder, self.experiment, self.policy, self.stop = folder, experiment, policy, stop
        self.name = name or experiment.config.method
        self.observers = [] if experiment.ranks.rank else list(observers)
        self.started: list[Observer] = []
        self.failure: Exception | None = None
        """What an observer has raised."""

    def play(self) -> Generator[Step]:
        if self.folder is not None:
            yield from play_run(self.folder, self.experiment, self.policy, self.stop, self.tell_start)
        else:
            self.tell_start(self.experiment.played)
            yield from self.experiment.play()

    def tell_start(self, after: int) -> None:
        config = self.experiment.config
        if self.folder is not None and self.policy.restart and not self.experiment.ranks.rank:
            forget_logged(self.folder)
        metrics = tuple(MetricInfo(**each) for each in describe_metrics(self.experiment.population.task))
        run = RunInfo(self.name, config.rounds, after, self.folder, flatten_settings(config), metrics)
        for observer in self.observers:
            observer.start(run)
            self.started.append(observer)

    def tell_round(self, step: Step) -> None:
        try:
            for observer in self.observers:
                observer.round(step.record, step.timing)
        except Exception as error:
            if self.folder is None:
                raise
            # The run stops as after a signal, on all ranks.
            self.failure, self.stop.signal = error, self.stop.signal or signal.SIGTERM

    def leave(self, steps: Iterator[Step]) -> None:
        """Saves the run, from which the caller takes no further rounds."""
        if self.folder is not None and not sys.is_finalizing():
            self.stop.signal = self.stop.signal or signal.SIGTERM
            with suppress(RunStopped):
                next(steps, None)

    def tell_end(self, reason: str, error: BaseException | None = None) -> None:
        # A signal may have come before all of them were started.
        for observer in self.started:
            observer.end(RunEnd(reason, error=error) if self.folder is None else read_end(self.folder, reason, error))
