"""Where a run begins: at its first round, or after the newest checkpoint that can be used and is this run's."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedhen.config import toml, validation
from fedhen.config.settings import Config
from fedhen.errors import UserError
from fedhen.experiment import checkpoint_files, checkpoint_state, provenance
from fedhen.experiment.checkpoint_files import Checkpoint, DamagedCheckpoint
from fedhen.experiment.experiment import Experiment
from fedhen.fileio.locks import lock_folder
from fedhen.runs.layout import CONFIG, ENVIRONMENT, ROUNDS, SUMMARY, TIMING
from fedhen.runs.reader import read_run
from fedhen.runs.writer import RunWriter, read_whole_lines

FREE = (
    *("rounds", "runtime.workers", "runtime.storage", "runtime.storage_dir", "checkpoint.minutes", "checkpoint.rounds"),
    *("fleet.deadline_seconds", "fleet.answers", "fleet.spare_devices", "fleet.wait_seconds"),
)
"""Settings that may change from one part of a run to the next: no number that is played depends on them."""


@dataclass(frozen=True)
class ResumePolicy:
    """How a run treats what it finds in its folder."""

    resume: bool = False
    """Go on with it, where there is something."""
    restart: bool = False
    """Where its checkpoints are all damaged, start again."""
    otherwise: str = "start another run, or `fedhen resume --restart` starts it again at round 1"
    """What a user is told to do where no checkpoint can be used."""


NEW_RUN = ResumePolicy()


def flatten_settings(config: Config) -> dict[str, Any]:
    """Every setting by its full key, as JSON says it."""
    return validation.flatten_config(json.loads(json.dumps(asdict(config))))


def is_finished(folder: Path, config: Config) -> bool:
    """Whether a folder has the end of a run of so many rounds."""
    try:
        rounds = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["rounds"]
        return isinstance(rounds, int) and rounds >= config.rounds
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_same_settings(config: Config, before: Mapping[str, Any], whose: str) -> None:
    """Refuse to go on with other settings than before; one that was not known then is taken for its default."""
    if not isinstance(before, Mapping) or "rounds" not in before:
        raise TypeError(f"{whose} has no configuration")
    before = {validation.RENAMED.get(key, key): value for key, value in before.items()}
    now, before = flatten_settings(config), {**flatten_settings(Config()), **before}
    changed = [
        f"{key} is {json.dumps(now.get(key))}, was {json.dumps(before.get(key))}"
        for key in now.keys() | before.keys()
        if key not in FREE and now.get(key) != before.get(key)
    ]
    if changed:
        raise UserError(
            f"{whose} has another configuration: {'; '.join(sorted(changed))}; "
            "put it back, or start another run in another folder"
        )
    if config.rounds < before["rounds"]:
        raise UserError(f"{whose} is planned for {before['rounds']} rounds: some can be added, none taken away")
    if config.rounds > before["rounds"] and config.training.lr_schedule == "cosine":
        raise UserError(
            f"{whose} cannot get more rounds: its learning rate falls along a cosine over {before['rounds']} rounds "
            "(training.lr_schedule), so that every round would have been another; start another run"
        )


@dataclass
class RunStart:
    """What rank 0 finds in a run's folder."""

    folder: Path
    experiment: Experiment
    how: ResumePolicy
    saved: Checkpoint | None = None
    records: list[Mapping[str, Any]] = field(default_factory=list)
    """Of the rounds that are played."""
    timing: dict[str, float] = field(default_factory=dict)
    """Of the last of them."""
    seconds: float = 0.0
    """That the run has taken so far."""

    @cached_property
    def digests(self) -> dict[str, str]:
        """Of data and initial models."""
        return self.experiment.digests

    def find(self, held: ExitStack) -> dict[str, Any]:
        """Lock the folder and look into it; what all ranks must know of it."""
        held.enter_context(lock_folder(self.folder))
        self.place = self.folder / checkpoint_files.FOLDER
        config, plan = self.experiment.config, None
        # Before the first round is played: the initial models are among them.
        self.digests  # noqa: B018
        if self.how.resume and (self.folder / CONFIG).is_file():
            check_same_settings(config, flatten_settings(toml.read_toml(self.folder / CONFIG)), str(self.folder))
            if is_finished(self.folder, config):
                return {"finished": True, "saved": None}
            plan = None if self.how.restart else self.newest()
        checkpoint_files.discard_later(self.place, after=plan["played"] if plan else 0)
        return {"finished": False, "saved": plan}

    def newest(self) -> dict[str, Any] | None:
        """The newest checkpoint that can be used; none where the run was ended before its first."""
        wrong = []
        for number in checkpoint_files.list_rounds(self.place):
            try:
                plan = self.opened(number)
            except DamagedCheckpoint as error:
                wrong.append(f"the checkpoint of round {number} cannot be used: {error}")
                continue
            for message in wrong:
                warnings.warn(f"{message}; going on from round {number}", stacklevel=2)
            return plan
        if wrong:
            raise UserError(f"{self.folder}: {'; '.join(wrong)}; {self.how.otherwise}")
        if (self.folder / SUMMARY).is_file():
            raise UserError(
                f"{self.folder} is finished and has no checkpoint: no round can be added to it; {self.how.otherwise}"
            )
        warnings.warn(f"{self.folder} has no checkpoint yet: it starts again at round 1", stacklevel=2)
        return None

    def opened(self, number: int) -> dict[str, Any]:
        """A checkpoint compared with the folder, the configuration, the data and the models."""
        saved = checkpoint_files.open_checkpoint(self.place, number)
        try:
            about = saved.manifest
            self.seconds, self.timing = float(about["seconds"]), {k: float(v) for k, v in about["timing"].items()}
            if not all(map(math.isfinite, (self.seconds, *self.timing.values()))):
                raise DamagedCheckpoint("its times are no numbers")
            check_same_settings(self.experiment.config, about["config"], f"the checkpoint of round {number}")
            self.check_data(about["digests"])
            self.compare_versions(about["versions"])
        except (KeyError, TypeError, AttributeError):
            raise DamagedCheckpoint("its manifest is not what a manifest is") from None
        plan = checkpoint_state.check_checkpoint(saved, self.experiment.state())
        self.saved, self.records = saved, self.recorded(number)
        return plan

    def recorded(self, number: int) -> list[Mapping[str, Any]]:
        """The records of that many rounds, every one as a report would read it."""
        try:
            found: list[Mapping[str, Any]] = [record.to_dict() for record in read_run(self.folder).rounds[:number]]
        except UserError as error:
            raise DamagedCheckpoint(str(error)) from None
        if len(found) < number:
            raise DamagedCheckpoint(f"{ROUNDS} holds {len(found)} whole rounds only")
        return found

    def check_data(self, before: Mapping[str, str]) -> None:
        """Refuse to go on with other data than before."""
        now = self.digests
        if changed := [name for name in now if now[name] != before.get(name)]:
            raise UserError(
                f"{self.folder} was played with other data: the {', '.join(changed)} are not those of its checkpoint; "
                "give it the same, or start another run in another folder"
            )

    def compare_versions(self, before: Mapping[str, str]) -> None:
        """Another version may round otherwise."""
        if changed := [f"{n} {v} (was {before.get(n)})" for n, v in provenance.versions().items() if v != before[n]]:
            warnings.warn(f"going on with {', '.join(changed)}: the last digits may differ", stacklevel=2)

    def recorder(self) -> RunWriter:
        """Go on with the records, or begin them."""
        played = self.saved.round if self.saved else 0
        described = provenance.describe_environment(
            self.experiment.population.data.device, self.experiment.config.runtime, self.experiment.ranks
        )
        if played:
            described = {**described, "resumed": [*self._parts(), {"after": played}]}
        timed = len(read_whole_lines(self.folder / TIMING, played))
        recorder = RunWriter(self.folder, toml.to_toml(self.experiment.config), described, after=played)
        if timed == played - 1:
            # The crash came between the checkpoint and this line.
            recorder.write_timing(played, self.timing)
        return recorder

    def _parts(self) -> list[Any]:
        try:
            return list(json.loads((self.folder / ENVIRONMENT).read_text(encoding="utf-8")).get("resumed", []))
        except (OSError, ValueError, AttributeError, TypeError):
            return []
