"""Plays a run in its folder: records and saves it, from its start or from its last checkpoint."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedhen.config.data_settings import OWN
from fedhen.config.settings import Config
from fedhen.devices.workload import measure_workload
from fedhen.experiment import checkpoint_files, checkpoint_state, provenance
from fedhen.experiment.experiment import Experiment, Step
from fedhen.experiment.resume import NEW_RUN, ResumePolicy, RunStart, flatten_settings
from fedhen.experiment.saved_models import write_models
from fedhen.experiment.stopping import describe_rule
from fedhen.experiment.summary import Outcome, make_summary
from fedhen.fileio.background import BackgroundTask
from fedhen.interrupts import RoundAbandoned, RunStopped, StopNow, StopRequest
from fedhen.runs.layout import FLEET, PRIVATE, resume_command
from fedhen.runs.private import write_spent
from fedhen.runs.writer import RunWriter, explain_write_errors, write_device_errors


def play_run(
    folder: Path,
    experiment: Experiment,
    how: ResumePolicy = NEW_RUN,
    stop: StopRequest | None = None,
    begin: Callable[[int], None] = lambda after: None,
) -> Iterator[Step]:
    """Plays the rounds that are left and writes the run folder, on rank 0 only.

    If `stop` is requested, saves the last complete round and raises RunStopped. Yields nothing if the run is finished.
    Otherwise calls `begin` before the first round, with the number of rounds that were played before.
    """
    ranks, beginning, stop = experiment.ranks, RunStart(folder, experiment, how), stop or StopRequest()
    with ExitStack() as held:
        plan = ranks.first(lambda: beginning.find(held))
        if plan["finished"]:
            return
        if plan["saved"] is not None:
            experiment.reached = set(plan["reached"])
            experiment.restore(checkpoint_state.restore_state(beginning.saved, plan["saved"], experiment.state()))
        experiment.mechanism.recall(plan["spent"])
        keeper = RunKeeper(folder, experiment, beginning, held.enter_context(BackgroundTask()))
        if not ranks.rank:
            held.enter_context(explain_write_errors(folder))
            keeper.recorder = held.enter_context(beginning.open_recorder())
            beginning.save_start()
        begin(experiment.played)
        held.enter_context(stop.play())
        yield from _play_rounds(keeper, stop)
        keeper.finish()
    if number := max(ranks.gather(stop.signal)):
        raise RunStopped(number, f"stopped; {folder} is finished")


def _play_rounds(keeper: RunKeeper, stop: StopRequest) -> Iterator[Step]:
    steps, ranks = keeper.experiment.play(), keeper.experiment.ranks
    while True:
        try:
            with stop.round():
                step = next(steps, None)
        except RoundAbandoned:
            keeper.roll_back()
            raise RunStopped(stop.signal, keeper.stop_message(), abandoned=True) from None
        except StopNow:
            raise
        except KeyboardInterrupt as error:
            # From Python, where nothing holds Ctrl-C back until the end of the round.
            if ranks.number == 1:
                keeper.roll_back()
                # Below the traceback, where it is seen.
                error.add_note(f"fedhen: {keeper.stop_message(resume_call(keeper.experiment.config, keeper.folder))}")
            raise
        if step is None:
            return
        last = keeper.experiment.is_over
        yield keeper.commit(step, last or bool(stop.signal))
        # The signal may have come after the round was recorded, and only to some of the ranks.
        number = max(ranks.gather(stop.signal))
        if number and not last:
            keeper.save_last_round()
            raise RunStopped(number, keeper.stop_message())


def resume_call(config: Config, folder: Path) -> str:
    """Returns the call that resumes a run from Python."""
    named = {"family": config.model.family, "data": config.data.name, "task": config.task.name}
    again = [f"{part}={part}" for part, name in named.items() if name == OWN]
    return f"fedhen.resume({', '.join([repr(str(folder)), *again])})"


@dataclass
class RunKeeper:
    """Records complete rounds, and saves checkpoints when they are due."""

    folder: Path
    experiment: Experiment
    beginning: RunStart
    background: BackgroundTask
    recorder: RunWriter | None = None
    """Only on rank 0."""
    records: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records += self.beginning.records
        self.began = time.perf_counter() - self.beginning.seconds
        self.saved_at, self.saved_round = time.monotonic(), self.experiment.played
        self.tried_round = self.saved_round
        self.whole, self.timing = self.experiment.state(), self.beginning.timing
        for store in self.whole.stores.values():
            # An abandoned round has already changed the memories of some devices, so the previous ones are kept.
            store.keeps_previous = True

    def commit(self, step: Step, now: bool) -> Step:
        """Writes the record of a complete round, then the checkpoint if it is due, then the timing."""
        if self.recorder is not None:
            if step.spent:
                write_spent(self.folder, step.spent)
            self.recorder.write_private(step.private)
            errors = self.folder / PRIVATE if step.private else self.folder
            write_device_errors(errors, step.record["round"], step.failed)
            self.recorder.write_round(step.record)
            self.records.append(step.record)
        self.whole, self.timing = self.experiment.state(), step.timing
        for store in self.whole.stores.values():
            store.commit()
        if self.experiment.ranks.first(lambda: self._is_due(now)):
            seconds = self.save()
            step = replace(step, timing={**step.timing, "save": round(seconds, 6)})
        if self.recorder is not None:
            self.recorder.write_timing(self.whole.played, step.timing)
        return step

    def _is_due(self, now: bool) -> bool:
        when = self.experiment.config.checkpoint
        if not when.wanted:
            return False
        by_rounds = bool(when.rounds) and self.whole.played % when.rounds == 0
        by_time = bool(when.minutes) and time.monotonic() - self.saved_at >= 60 * when.minutes
        return now or by_rounds or by_time

    def save(self) -> float:
        """Saves the last complete round. Returns the seconds that the run waited. A full disk does not end the run."""
        began, number = time.perf_counter(), self.whole.played
        self.tried_round = number
        about: dict[str, Any] = {}
        if self.recorder is not None:
            # After a power cut the records must not be older than the checkpoint.
            with suppress(OSError):
                self.recorder.sync()
            about = {
                "seconds": round(began - self.began, 6),
                "timing": self.timing,
                "config": flatten_settings(self.experiment.config),
                "digests": self.beginning.digests,
                "versions": provenance.versions(),
            }
        write = checkpoint_state.prepare_checkpoint(self.whole, self.folder / checkpoint_files.FOLDER, about)
        if self.whole.lasts:
            self.background.begin(partial(self._write, write, number))
        else:
            self._write(write, number)
        self.saved_at = time.monotonic()
        return time.perf_counter() - began

    def _write(self, write: Callable[[], None], number: int) -> None:
        try:
            write()
            self.saved_round = number
        except OSError as error:
            warnings.warn(f"round {number} could not be saved ({error.strerror}): the run continues", stacklevel=2)

    def roll_back(self) -> None:
        """Discards the abandoned round, and saves the one before."""
        for store in self.whole.stores.values():
            store.rollback()
        self.save_last_round()

    def save_last_round(self) -> None:
        """Saves the last complete round, unless that was already tried, and waits until it is written."""
        slow = f"round {self.whole.played} is being saved; a second Ctrl-C does not wait for it"
        self.background.end(slow)
        wanted = self.experiment.config.checkpoint.wanted
        if self.experiment.ranks.first(lambda: wanted and self.whole.played > self.tried_round):
            self.save()
        self.background.end(slow)

    def stop_message(self, how: str = "") -> str:
        """Returns what is saved and how to resume, by default with a command."""
        done, resume = f"stopped after round {self.whole.played}", f"resume with: {how or resume_command(self.folder)}"
        if self.saved_round == self.whole.played:
            return f"{done}; {resume}"
        if self.saved_round:
            return f"{done}, of which {self.saved_round} are saved; {resume}"
        return f"{done}; no round is saved (checkpoint.minutes, checkpoint.rounds), so it would start again at round 1"

    def finish(self) -> None:
        """Writes the models and the summary. Keeps one checkpoint, so that rounds can be added."""
        if self.recorder is not None:
            # The checkpoint first: if it does not fit the disk, it is removed, and the models get its space.
            self.background.end()
            experiment, best = self.experiment, self.experiment.best_models()
            about = experiment.about_models()
            write_models(self.folder, experiment.complete_models(), best, experiment.played, about)
            outcome = Outcome(
                experiment.parameters(),
                measure_workload(experiment.population),
                {owner: {tier: model.round for tier, model in tiers.items()} for owner, tiers in best.items()},
                time.perf_counter() - self.began,
                self.describe_stop(),
                (self.folder / FLEET).is_file(),
                experiment.mechanism.spent,
            )
            self.recorder.finish(make_summary(experiment.config, experiment.metrics, self.records, outcome))
            checkpoint_files.keep_newest(self.folder / checkpoint_files.FOLDER, 1)

    def describe_stop(self) -> dict[str, Any]:
        """Returns why the run ends before its last planned round; empty if it does not."""
        config, reason = self.experiment.config, self.experiment.standing.reason
        is_early = self.experiment.played < config.rounds
        return {"reason": reason, "rule": describe_rule(config)} if is_early else {}
