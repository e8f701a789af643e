"""Reads the models of any run: of a finished one from its files, else from its newest good checkpoint.

Nothing is locked or executed, so a run may be played meanwhile. `checkpoints/start.safetensors` has what the
checkpoints of the rounds lack: the initial models, the weights that no device trains, and the metadata of their files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from fedhen.config import toml
from fedhen.config.personal_settings import OWN_SCORES_ONLY
from fedhen.config.settings import Config
from fedhen.errors import CheckpointError, unknown_name
from fedhen.experiment import checkpoint_files
from fedhen.experiment.best_models import BestModel
from fedhen.experiment.checkpoint_files import START, Checkpoint, DamagedCheckpoint, Entry, TensorSpec, spec_of
from fedhen.experiment.checkpoint_state import STORES, number_tensors
from fedhen.experiment.reported_models import average_rows
from fedhen.fileio.untrusted import PARSE_ERRORS, check_int
from fedhen.models.model_files import SavedModel, make_saved_model, model_path, read_model, save_models
from fedhen.params import TierModels, Weights, count_elements, packed_type
from fedhen.runs.folders import find_config
from fedhen.runs.joined import read_joined
from fedhen.runs.layout import BEST, MODEL_OWNERS, MODELS, MOMENTS
from fedhen.runs.reader import read_summary
from fedhen.runs.records import Summary

T = TypeVar("T")


def open_models(folder: Path) -> FinishedModels | CheckpointModels:
    """Opens the models of a run, to `read` them by tier, owner and moment. Raises CheckpointError if it has none.

    Example: `open_models(Path("my-run")).read("simple", of="devices", at="best").weights`
    """
    config, place = toml.read_toml(find_config(folder)), folder / checkpoint_files.FOLDER
    summary = read_summary(folder)
    if summary is None and checkpoint_files.list_rounds(place):
        return open_newest(folder, partial(open_checkpoint_models, folder, config))
    if summary is None and not (folder / MODELS).is_dir():
        raise CheckpointError(
            f"{folder} has no models yet: it is not finished, and has no checkpoint (checkpoint.rounds, "
            "checkpoint.minutes)"
        )
    return FinishedModels(folder, config, summary)


def open_newest(folder: Path, use: Callable[[Checkpoint], T]) -> T:
    """Calls `use` with the newest checkpoint, or an older one if it is damaged or is replaced meanwhile."""
    place, wrong = folder / checkpoint_files.FOLDER, dict[int, str]()
    while left := [number for number in checkpoint_files.list_rounds(place) if number not in wrong]:
        try:
            return use(checkpoint_files.open_checkpoint(place, left[0]))
        except DamagedCheckpoint as error:
            wrong[left[0]] = f"the checkpoint of round {left[0]} cannot be used: {error}"
    raise CheckpointError(f"{folder}: {'; '.join(wrong.values()) or 'it has no checkpoint'}")


def check_choice(config: Config, tier: str, of: str, at: str) -> None:
    """Refuses a model that the run cannot have."""
    for kind, name, known in (("tier", tier, tuple(config.tiers)), ("owner", of, MODEL_OWNERS), ("at", at, MOMENTS)):
        if name not in known:
            raise unknown_name(kind, name, known)
    if of == "devices" and not config.evaluation.devices:
        raise CheckpointError(
            "the run kept no average of all devices (evaluation.devices = false): use the server's models"
        )


def refuse_incomplete(config: Config) -> None:
    """Refuses the server's models of a run whose server has none that is whole."""
    if config.personal.name in OWN_SCORES_ONLY:
        raise CheckpointError(
            f"with personal.name={config.personal.name} only devices have whole models: fedhen.load(run, device=0) "
            "loads that of a device, and fedhen export RUN --device 0 exports it"
        )


def refuse_best(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} has no best model: no round was scored, or it was played by an earlier version; take the last one"
    )


@dataclass(frozen=True)
class FinishedModels:
    """The models of a finished run, from their files."""

    folder: Path
    config: Config
    summary: Summary | None

    @property
    def round(self) -> int:
        """The last round; 0 if the run is from before that was recorded."""
        return self.summary.rounds if self.summary else 0

    @property
    def unfinished(self) -> str:
        """A line that says which round the models are of, if the run is not finished; else ""."""
        return ""

    def read(self, tier: str, of: str = "server", at: str = "last") -> SavedModel:
        """Reads a model with its round.

        Args:
            tier: The tier.
            of: "server", or "devices" for the average of all devices' last models.
            at: "last", or "best" for the round in which this model was best.
        """
        check_choice(self.config, tier, of, at)
        if at == BEST:
            best = self.summary.best_rounds.get(of, {}).get(tier) if self.summary else None
            if best is None:
                raise refuse_best(self.folder)
            if best != self.round:
                return replace(read_model(self.folder, f"{BEST}-{of}", tier), round=best)
        return replace(read_model(self.folder, of, tier), round=self.round)


def open_checkpoint_models(folder: Path, config: Config, saved: Checkpoint) -> CheckpointModels:
    """Opens the models of a checkpoint. From then on its files may be removed."""
    if not checkpoint_files.has_checkpoint(saved.place, START):
        raise CheckpointError(
            f"{folder} has checkpoints, but not what it started from (checkpoints/start.safetensors): resume it, which "
            "writes that"
        )
    start = checkpoint_files.open_checkpoint(saved.place, START)
    for each in (saved, start):
        each.open()
    return CheckpointModels(folder, config, saved, start)


@dataclass(frozen=True)
class CheckpointModels:
    """The models of a run that is not finished, from a checkpoint; with the same attributes and methods."""

    folder: Path
    config: Config
    saved: Checkpoint
    start: Checkpoint

    @property
    def round(self) -> int:
        return self.saved.round

    @property
    def unfinished(self) -> str:
        return f"{self.folder} is not finished: its models are of round {self.round} of {self.config.rounds}"

    def read(self, tier: str, of: str = "server", at: str = "last") -> SavedModel:
        check_choice(self.config, tier, of, at)
        try:
            number = self.find_round(tier, of, at)
            fixed, learned = self.read_start(tier)
            if number != self.round:
                weights = self.read_part(f"{BEST}-{of}", tier)
            else:
                weights = self.read_part("server", tier) if of == "server" else self.average(tier, learned)
            return replace(make_saved_model({**fixed, **weights}, self.start.manifest["models"][tier]), round=number)
        except (*PARSE_ERRORS, IndexError, DamagedCheckpoint, RuntimeError, SafetensorError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.folder}: the checkpoint of round {self.round} is malformed") from None

    def find_round(self, tier: str, of: str, at: str) -> int:
        """Returns the round of a model."""
        if at != BEST:
            return self.round
        best = self.saved.manifest.get("standing", {}).get("best", {}).get(of, {})
        if tier not in best:
            raise refuse_best(self.folder)
        return check_int(best[tier][0], 1)

    def best_models(self) -> dict[str, dict[str, BestModel]]:
        """Returns owner -> tier -> its best model."""
        found: dict[str, dict[str, BestModel]] = {}
        for of, tiers in self.saved.manifest.get("standing", {}).get("best", {}).items():
            models = {tier: self.read(tier, of, BEST) for tier in tiers}
            found[of] = {
                t: BestModel(models[t].round, float(value), models[t].weights) for t, (_, value) in tiers.items()
            }
        return found

    def read_part(self, part: str, tier: str) -> Weights:
        numbers: Mapping[str, int] = self.saved.manifest["sharing"][part][tier]
        return {name: self.saved.tensor(f"{part}.{int(number)}") for name, number in numbers.items()}

    def read_start(self, tier: str) -> tuple[Weights, Weights]:
        """Returns the weights that no device trains, and the initial values of the others, in their order."""
        numbers = self.start.manifest["sharing"][tier]
        initial = {name: self.start.tensor(f"initial.{int(number)}") for name, number in numbers.items()}
        learned = {name: initial.pop(name) for name in self.saved.manifest["sharing"]["server"][tier]}
        return initial, learned

    def average(self, tier: str, initial: Weights) -> Weights:
        """Returns the average of the last models of a tier's devices."""
        tier_of, kind = self.config.tier_of_devices(), TensorSpec((count_elements(initial),), packed_type(initial))
        tier_of += read_joined(self.folder, len(tier_of), self.round)

        def rows() -> Iterator[Tensor]:
            for device, _ in self.saved.manifest[STORES]["rows"]:
                if tier_of[check_int(device)] == tier:
                    row = self.saved.tensor(f"rows.{device}")
                    if spec_of(row) != kind:
                        raise DamagedCheckpoint("the model of a device has another shape")
                    yield row

        held_out = self.config.tier_sizes()[tier] - self.config.training_sizes()[tier]
        return average_rows(initial, rows(), tier_of.count(tier) - held_out)


def save_start(place: Path, initial: TierModels, about: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes what the checkpoints of the rounds lack: the initial models, and tier -> the metadata of its file."""
    sharing, tensors = number_tensors(initial)
    entries = [
        Entry(f"initial.{number}", spec_of(tensor), partial(_identity, tensor)) for number, tensor in enumerate(tensors)
    ]
    checkpoint_files.write_checkpoint(place, START, entries, {"sharing": sharing, "models": about})


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def write_models(
    folder: Path,
    last: Mapping[str, TierModels],
    best: Mapping[str, Mapping[str, BestModel]],
    played: int,
    about: Mapping[str, Mapping[str, Any]],
) -> None:
    """Writes the models of the last round, and those of the best round that are not the same, with their round."""
    save_models(folder, last, about)
    kept = set()
    for owner, tiers in best.items():
        for tier, model in tiers.items():
            if model.round != played:
                kind = f"{BEST}-{owner}"
                save_models(folder, {kind: {tier: model.weights}}, {tier: {**about[tier], "round": model.round}})
                kept.add(model_path(folder, kind, tier))
    for path in (folder / MODELS).glob(f"{BEST}-*.safetensors"):
        if path not in kept:
            path.unlink()
