"""A run in its folder: played, recorded and saved, from its start or from its last checkpoint."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedhen.experiment import checkpoint_files, checkpoint_state, provenance
from fedhen.experiment.experiment import Experiment, Step
from fedhen.experiment.resume import NEW_RUN, ResumePolicy, RunStart, flatten_settings
from fedhen.fileio.background import BackgroundTask
from fedhen.interrupts import RoundAbandoned, RunStopped, StopRequest
from fedhen.models.model_files import save_models
from fedhen.runs.layout import resume_command
from fedhen.runs.writer import RunWriter, explain_write_errors, write_device_errors


def play_run(
    folder: Path, experiment: Experiment, how: ResumePolicy = NEW_RUN, stop: StopRequest | None = None
) -> Iterator[Step]:
    """Play the rounds that are left and leave a run folder behind; rank 0 alone writes it.

    Told to stop it saves the last whole round and raises Stopped. Nothing is yielded where the run is finished.
    """
    ranks, beginning, stop = experiment.ranks, RunStart(folder, experiment, how), stop or StopRequest()
    with ExitStack() as held:
        plan = ranks.first(lambda: beginning.find(held))
        if plan["finished"]:
            return
        if plan["saved"] is not None:
            experiment.restore(checkpoint_state.restore_state(beginning.saved, plan["saved"], experiment.state()))
        keeper = RunKeeper(folder, experiment, beginning, held.enter_context(BackgroundTask()))
        if not ranks.rank:
            held.enter_context(explain_write_errors(folder))
            keeper.recorder = held.enter_context(beginning.recorder())
        held.enter_context(stop.play())
        yield from _played(keeper, stop)
        keeper.finish()
    if told := max(ranks.gather(stop.signal)):
        raise RunStopped(told, f"stopped; {folder} is finished")


def _played(keeper: RunKeeper, stop: StopRequest) -> Iterator[Step]:
    steps, ranks = keeper.experiment.play(), keeper.experiment.ranks
    while True:
        try:
            with stop.round():
                step = next(steps, None)
        except RoundAbandoned:
            keeper.take_back()
            raise RunStopped(stop.signal, keeper.goodbye(), abandoned=True) from None
        if step is None:
            return
        last = step.record["round"] == keeper.experiment.config.rounds
        yield keeper.commit(step, last or bool(stop.signal))
        # It may have come after the round was recorded, and to some of the ranks only.
        told = max(ranks.gather(stop.signal))
        if told and not last:
            keeper.save_at_last()
            raise RunStopped(told, keeper.goodbye())


@dataclass
class RunKeeper:
    """Records whole rounds, and saves them when it is time to."""

    folder: Path
    experiment: Experiment
    beginning: RunStart
    beside: BackgroundTask
    recorder: RunWriter | None = None
    """Rank 0's."""
    records: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records += self.beginning.records
        self.began = time.perf_counter() - self.beginning.seconds
        self.saved_at, self.saved_round = time.monotonic(), self.experiment.played
        self.tried_round = self.saved_round
        self.whole, self.timing = self.experiment.state(), self.beginning.timing
        for shelf in self.whole.shelves.values():
            # A round that is abandoned has changed what some of its devices remember.
            shelf.keeps_previous = True

    def commit(self, step: Step, now: bool) -> Step:
        """A whole round: its line, then the checkpoint if it is due, then what both took."""
        if self.recorder is not None:
            write_device_errors(self.folder, step.record["round"], step.failed)
            self.recorder.write_round(step.record)
            self.records.append(step.record)
        self.whole, self.timing = self.experiment.state(), step.timing
        for shelf in self.whole.shelves.values():
            shelf.commit()
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
        """Save the last whole round, and tell how long the run waited for it; a full disk does not end it."""
        began, number = time.perf_counter(), self.whole.played
        self.tried_round = number
        about: dict[str, Any] = {}
        if self.recorder is not None:
            # What the checkpoint counts on must not be behind it after a power cut.
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
            self.beside.begin(partial(self._write, write, number))
        else:
            self._write(write, number)
        self.saved_at = time.monotonic()
        return time.perf_counter() - began

    def _write(self, write: Callable[[], None], number: int) -> None:
        try:
            write()
            self.saved_round = number
        except OSError as error:
            warnings.warn(f"round {number} could not be saved ({error.strerror}): the run goes on", stacklevel=2)

    def take_back(self) -> None:
        """Forget the round that was abandoned, and save the one before."""
        for shelf in self.whole.shelves.values():
            shelf.rollback()
        self.save_at_last()

    def save_at_last(self) -> None:
        """Save the last whole round, unless it is or could not be, and wait for it."""
        slow = f"round {self.whole.played} is being saved; a second Ctrl-C does not wait for it"
        self.beside.end(slow)
        wanted = self.experiment.config.checkpoint.wanted
        if self.experiment.ranks.first(lambda: wanted and self.whole.played > self.tried_round):
            self.save()
        self.beside.end(slow)

    def goodbye(self) -> str:
        """How to go on."""
        done, resume = f"stopped after round {self.whole.played}", f"go on with: {resume_command(self.folder)}"
        if self.saved_round == self.whole.played:
            return f"{done}; {resume}"
        if self.saved_round:
            return f"{done}, of which {self.saved_round} are saved; {resume}"
        return f"{done}, which is not saved (checkpoint.minutes, checkpoint.rounds): it would start again"

    def finish(self) -> None:
        """The models and the summary; one checkpoint is left, so that rounds can be added."""
        if self.recorder is not None:
            # First: a checkpoint that does not fit the disk must not take the models' room.
            self.beside.end()
            save_models(self.folder, self.experiment.reported, self.experiment.about_models())
            self.recorder.finish(make_summary(self.experiment, self.records, time.perf_counter() - self.began))
            checkpoint_files.keep_newest(self.folder / checkpoint_files.FOLDER, 1)


def make_summary(experiment: Experiment, records: list[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """The end of a run in a few numbers."""
    config, scored = experiment.config, [r["accuracy"] for r in records if "accuracy" in r]
    # The server of a fleet may have no test data.
    final = scored[-1] if scored else {}
    best = {kind: {tier: max(s[kind][tier] for s in scored) for tier in tiers} for kind, tiers in final.items()}
    late = sum(len(r.get("late", ())) for r in records)
    return {
        "recipe": config.recipe,
        "method": config.method,
        "seed": config.seed,
        "rounds": config.rounds,
        "parameters": experiment.parameters(),
        **({"final": final, "best": best} if scored else {}),
        "dropped": sum(len(r["dropped"]) for r in records),
        "failed": sum(len(r.get("failed", ())) for r in records),
        **({"late": late} if late else {}),
        "bytes": sum(n for r in records for way in r["bytes"].values() for n in way.values()),
        "seconds": round(seconds, 3),
    }
