"""Finds where a run starts: at its first round, or after the newest checkpoint that can be used."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedhen.config import toml, validation
from fedhen.config.settings import Config
from fedhen.data.digests import name_data_set
from fedhen.errors import CheckpointError, FedhenError
from fedhen.experiment import checkpoint_files, checkpoint_state, provenance
from fedhen.experiment.checkpoint_files import Checkpoint, DamagedCheckpoint
from fedhen.experiment.experiment import Experiment
from fedhen.experiment.saved_models import save_start
from fedhen.experiment.stopping import describe_rule, read_rule
from fedhen.fileio.locks import lock_folder
from fedhen.params import TierModels
from fedhen.runs.layout import CONFIG, ENVIRONMENT, PRIVATE, ROUNDS, SECRET, SUMMARY, TIMING
from fedhen.runs.lines import read_whole_lines
from fedhen.runs.private import make_closed, read_participation, read_secret, read_spent, write_secret
from fedhen.runs.reader import read_run
from fedhen.runs.writer import RunWriter
from fedhen.tasks.registry import describe_metrics

FREE = (
    *("rounds", "stop.until", "stop.patience", "privacy.budget"),
    *("runtime.workers", "runtime.storage", "runtime.storage_dir", "checkpoint.minutes", "checkpoint.rounds"),
    *("fleet.deadline_seconds", "fleet.answers", "fleet.spare_devices", "fleet.wait_seconds", "fleet.losses"),
)
"""Settings that may change when a run is resumed: no result of a round depends on them."""


@dataclass(frozen=True)
class ResumePolicy:
    """What to do with a run that is already in the folder."""

    resume: bool = False
    """Resume it, if there is one."""
    restart: bool = False
    """Start again at round 1 instead of at a checkpoint."""
    otherwise: str = "start another run, or start this one again at round 1 with `fedhen resume --restart`"
    """The advice if no checkpoint can be used."""


NEW_RUN = ResumePolicy()


def flatten_settings(config: Config) -> dict[str, Any]:
    """Returns every setting by its full key, with values as JSON represents them."""
    return validation.flatten_config(json.loads(json.dumps(asdict(config))))


def is_finished(folder: Path, config: Config) -> bool:
    """Returns whether the run in a folder has played all rounds of the configuration, or has stopped by its rule."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        rounds, stopped = summary["rounds"], summary.get("stopped", {})
        return isinstance(rounds, int) and (rounds >= config.rounds or stopped.get("rule") == describe_rule(config))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def check_same_settings(config: Config, before: Mapping[str, Any], whose: str) -> None:
    """Raises CheckpointError if settings differ from those before. A setting that is new had its default."""
    if not isinstance(before, Mapping) or "rounds" not in before:
        raise TypeError(f"{whose} has no configuration")
    before = {validation.RENAMED.get(key, key): value for key, value in before.items()}
    now, before = flatten_settings(config), {**flatten_settings(Config()), **before}
    if now["split.kind"] == "natural":
        # Before there was this name, runs on data that came split had any other: the data itself is compared.
        before["split.kind"] = "natural"
    changed = [
        f"{key} is {json.dumps(now.get(key))}, was {json.dumps(before.get(key))}"
        for key in now.keys() | before.keys()
        if key not in FREE and now.get(key) != before.get(key)
    ]
    if changed:
        raise CheckpointError(
            f"{whose} has another configuration: {'; '.join(sorted(changed))}; "
            "restore these settings, or start a new run in another folder"
        )
    if config.rounds < before["rounds"]:
        raise CheckpointError(
            f"{whose} was planned for {before['rounds']} rounds; rounds can be added but not removed: `fedhen finish` "
            "ends a run where it is"
        )
    if config.rounds > before["rounds"] and config.training.lr_schedule == "cosine":
        raise CheckpointError(
            f"{whose} cannot get more rounds: its learning rate falls along a cosine over {before['rounds']} rounds "
            "(training.lr_schedule), so its earlier rounds would have been different; start a new run"
        )


@dataclass
class RunStart:
    """What rank 0 has found in the folder of a run."""

    folder: Path
    experiment: Experiment
    how: ResumePolicy
    saved: Checkpoint | None = None
    records: list[Mapping[str, Any]] = field(default_factory=list)
    """The records of the rounds that were played."""
    timing: dict[str, float] = field(default_factory=dict)
    """The timing of the last of these rounds."""
    seconds: float = 0.0
    """The seconds that the run has taken so far."""
    initial: TierModels = field(default_factory=dict)
    """The models that training starts from, until they are saved."""

    @cached_property
    def digests(self) -> dict[str, str]:
        return self.experiment.digests

    def find(self, held: ExitStack) -> dict[str, Any]:
        """Locks the folder and looks for a checkpoint. Returns what all ranks must know about it."""
        held.enter_context(lock_folder(self.folder))
        self.place = self.folder / checkpoint_files.FOLDER
        config, plan = self.experiment.config, None
        # Read here because the first round replaces the initial models.
        self.initial, _ = self.experiment.initial_models(), self.digests
        if self.how.resume and (self.folder / CONFIG).is_file():
            check_same_settings(config, flatten_settings(toml.read_toml(self.folder / CONFIG)), str(self.folder))
            self.check_secret()
            if is_finished(self.folder, config):
                return {"finished": True, "saved": None}
            plan = None if self.how.restart else self.open_newest()
            if plan is None:
                self.experiment.reopen(0)
        played = plan["played"] if plan else 0
        checkpoint_files.discard_later(self.place, after=played)
        return {
            "finished": False,
            "saved": plan,
            "reached": sorted(
                {device for each in read_participation(self.folder, played) for device in each["active"]}
            ),
            "spent": read_spent(self.folder) if self.how.resume else [],
        }

    def check_secret(self) -> None:
        """Raises CheckpointError if the random streams would follow from something else than before."""
        if read_secret(self.folder) != self.experiment.population.run_streams.secret:
            raise CheckpointError(
                f"{self.folder} has another secret in {PRIVATE}/{SECRET} than the one that was given: "
                "resume it with its own, or start a new run in another folder"
            )

    def open_newest(self) -> dict[str, Any] | None:
        """Opens the newest checkpoint that can be used. Returns None if the run ended before its first checkpoint."""
        wrong = []
        for number in checkpoint_files.list_rounds(self.place):
            try:
                plan = self.open_round(number)
            except DamagedCheckpoint as error:
                wrong.append(f"the checkpoint of round {number} cannot be used: {error}")
                continue
            for message in wrong:
                warnings.warn(f"{message}; continuing from round {number}", stacklevel=2)
            return plan
        if wrong:
            raise CheckpointError(f"{self.folder}: {'; '.join(wrong)}; {self.how.otherwise}")
        if (self.folder / SUMMARY).is_file():
            raise CheckpointError(
                f"{self.folder} is finished and has no checkpoint, so no rounds can be added; {self.how.otherwise}"
            )
        warnings.warn(f"{self.folder} has no checkpoint yet: it starts again at round 1", stacklevel=2)
        return None

    def open_round(self, number: int) -> dict[str, Any]:
        """Opens a checkpoint and compares it with the folder, the configuration, the data and the models."""
        saved = checkpoint_files.open_checkpoint(self.place, number)
        try:
            about = saved.manifest
            self.seconds, self.timing = float(about["seconds"]), {k: float(v) for k, v in about["timing"].items()}
            if not all(map(math.isfinite, (self.seconds, *self.timing.values()))):
                raise DamagedCheckpoint("its times are not finite numbers")
            check_same_settings(self.experiment.config, about["config"], f"the checkpoint of round {number}")
            self.check_data(about["digests"])
            self.compare_versions(about["versions"])
        except (KeyError, TypeError, AttributeError):
            raise DamagedCheckpoint("its manifest is malformed") from None
        self.experiment.reopen(number)
        plan = checkpoint_state.check_checkpoint(saved, self.experiment.state())
        self.saved, self.records = saved, self.read_records(number)
        if read_rule(about["config"]) != describe_rule(self.experiment.config):
            # A run that had stopped continues, because it got more rounds or another rule.
            waited = 0 if plan["standing"].get("reason") else plan["standing"].get("waited", 0)
            plan["standing"] = {**plan["standing"], "waited": waited, "reason": ""}
        return plan

    def read_records(self, number: int) -> list[Mapping[str, Any]]:
        """Returns the records of the first `number` rounds, checked as for a report."""
        try:
            found: list[Mapping[str, Any]] = [record.to_dict() for record in read_run(self.folder).rounds[:number]]
        except FedhenError as error:
            raise DamagedCheckpoint(str(error)) from None
        if len(found) < number:
            raise DamagedCheckpoint(f"{ROUNDS} holds only {len(found)} complete rounds")
        return found

    def check_data(self, before: Mapping[str, str]) -> None:
        """Raises CheckpointError if data, initial models or own files differ from those before."""
        now = self.digests
        known = [name for name in now if name in before or name not in checkpoint_state.FILES]
        if changed := [name for name in known if now[name] != before.get(name)]:
            raise CheckpointError(
                f"{self.folder} cannot be continued, because this has changed since its checkpoint: "
                f"{', '.join(changed)}; use the same data and files, or start a new run in another folder"
            )

    def compare_versions(self, before: Mapping[str, str]) -> None:
        """Warns if versions differ from those before, because results may be rounded differently."""
        if changed := [f"{n} {v} (was {before.get(n)})" for n, v in provenance.versions().items() if v != before[n]]:
            warnings.warn(f"continuing with {', '.join(changed)}: the last digits may differ", stacklevel=2)

    def open_recorder(self) -> RunWriter:
        """Opens the records of the run, to append to them or to start them."""
        played = self.saved.round if self.saved else 0
        population = self.experiment.population
        if secret := population.run_streams.secret:
            # Before the configuration, with which a run can be resumed.
            write_secret(self.folder, secret)
        if population.config.privacy.is_private:
            # Checkpoints hold past noise, and which devices took part.
            make_closed(self.place)
        described = provenance.describe_environment(
            population.data.device, self.experiment.config.runtime, self.experiment.ranks
        )
        described |= {"task": population.task.name, "metrics": describe_metrics(population.task)}
        # The server of a real fleet has no training data, and so no shards.
        if population.data.shards and not population.config.privacy.is_private:
            described["data_digest"] = name_data_set(population.data, self.digests)
        if played:
            described = {**described, "resumed": [*self._read_resumptions(), {"after": played}]}
        timed = len(read_whole_lines(self.folder / TIMING, played))
        recorder = RunWriter(self.folder, toml.to_toml(self.experiment.config), described, after=played)
        if timed == played - 1:
            # The run crashed after the checkpoint, before it wrote this line.
            recorder.write_timing(played, self.timing)
        return recorder

    def save_start(self) -> None:
        """Saves what the run starts from, so that the models of its checkpoints can be read without it."""
        initial, self.initial = self.initial, {}
        if self.experiment.config.checkpoint.wanted:
            # If there is no space, the next checkpoint warns of it.
            with suppress(OSError):
                save_start(self.place, initial, self.experiment.about_models())

    def _read_resumptions(self) -> list[Any]:
        try:
            return list(json.loads((self.folder / ENVIRONMENT).read_text(encoding="utf-8")).get("resumed", []))
        except (OSError, ValueError, AttributeError, TypeError):
            return []
