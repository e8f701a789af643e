"""What the files of a run folder hold, as records whose types and bounds are checked when they are read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from fedhen.fileio.untrusted import MOST, check_int, check_mapping, check_number, check_text
from fedhen.profiles.workload import TrainingPhase

Positive = Annotated[int, 1, MOST]
Count = Annotated[int, 0, MOST]
NonNegative = Annotated[float, 0, MOST]
Share = Annotated[float, 0, 1]
Scores = dict[str, dict[str, Share]]
"""Owner ("devices" or "server") -> tier -> accuracy."""
Values = dict[str, dict[str, float | None]]
"""Owner ("devices" or "server") -> tier -> a metric; None if it is not finite."""
DeviceValues = dict[str, dict[str, list[float | None]]]
"""Owner -> tier -> a metric of each of its devices, in their order; None for a device without test data."""

LONGEST_NAME = 100
"""Characters of a metric's name and unit together."""
WORDS = {"f1": "F1", "iou": "IoU", "mae": "MAE", "mse": "MSE", "r2": "R²", "rmse": "RMSE", "top5": "top-5 accuracy"}
"""Part of a metric's name -> how people write it."""
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """A line of rounds.jsonl."""

    round: int
    active: list[int]
    dropped: list[int]
    """Devices whose weights were not finite."""
    failed: list[int] = field(default_factory=list)
    """Devices whose training raised an error."""
    late: list[int] = field(default_factory=list)
    loss: float | None = None
    bytes: dict[str, dict[str, int]]
    """Direction ("down" or "up") -> tier -> bytes."""
    bound: NonNegative | None = None
    """The largest norm of a device's change, if changes are bounded."""
    epsilon: NonNegative | None = None
    """ε of differential privacy that the run has spent; None if there is no promise."""
    accuracy: Scores = field(default_factory=dict)
    """Empty if the round was not evaluated."""
    ensemble: Values = field(default_factory=dict)
    """The primary metric of all exits together; empty if it was not asked for."""
    validation: Values = field(default_factory=dict)
    """The primary metric on the held-out training examples; empty if none are held out."""
    metrics: dict[str, Values] = field(default_factory=dict)
    """Metric -> its values, for all metrics but accuracy."""
    own: DeviceValues = field(default_factory=dict)
    """The primary metric on each device's own test data; empty if it was not asked for."""
    held_out: DeviceValues = field(default_factory=dict)
    """The same for the devices that never train; empty if there are none."""
    scored: str = ""
    """"own models" if the server has no whole model, so that its scores are the means of the devices' own; else ""."""
    distance: dict[str, float] | None = None
    """Tier -> distance between its server model and the deepest tier's."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the record as it is written, without the keys that it leaves out."""
        optional = ("failed", "late", "accuracy", "ensemble", "validation", "metrics", "own", "held_out", "scored")
        absent = [name for name in optional if not getattr(self, name)]
        absent += [name for name in ("bound", "epsilon", "distance") if getattr(self, name) is None]
        return {name: value for name, value in asdict(self).items() if name not in absent}

    def values(self, metric: str) -> Values:
        """Returns the values of a metric; empty if it was not recorded in this round."""
        found: Values = {owner: dict(tiers) for owner, tiers in self.accuracy.items()}
        return found if metric == ACCURACY.name and found else self.metrics.get(metric, {})


@dataclass(frozen=True)
class MetricInfo:
    """What reports know of a metric."""

    name: str
    unit: str = ""
    """"%" for a share between 0 and 1, which is shown in percent; else the unit to show, or none."""
    direction: str = "higher"
    """"higher" or "lower": which values are better."""

    def __post_init__(self) -> None:
        if self.direction not in ("higher", "lower"):
            raise ValueError(f"the direction of metric {self.name!r} is {self.direction!r}")
        if not (self.name + self.unit).isprintable() or len(self.name + self.unit) > LONGEST_NAME:
            raise ValueError(f"{self.name[:40]!r} cannot be the name of a metric")

    @property
    def title(self) -> str:
        """The name as people write it: micro F1 for micro_f1."""
        return " ".join(WORDS.get(word, word) for word in self.name.split("_"))

    @property
    def higher_is_better(self) -> bool:
        return self.direction != "lower"

    def scale(self, value: float) -> float:
        """Returns the value in its unit, without binary rounding errors: a share of 0.844 is 84.4 %."""
        return round(100 * value, 6) if self.unit == "%" else value

    def best(self, values: Iterable[float]) -> float:
        return max(values) if self.higher_is_better else min(values)

    def is_better(self, value: float, other: float) -> bool:
        return value > other if self.higher_is_better else value < other

    def reaches(self, value: float, target: float) -> bool:
        """Returns whether a recorded value is as good as a target, which is in the metric's unit, or better."""
        return not self.is_better(target, self.scale(value))

    def format(self, value: float | None) -> str:
        """Returns a value as text with its unit; `value` is as recorded."""
        if value is None:
            return "not finite"
        shown = f"{100 * value:.1f}" if self.unit == "%" else f"{value:.4g}"
        return f"{shown} {self.unit}".strip()


ACCURACY = MetricInfo("accuracy", "%")
"""The primary metric of runs that do not name one."""


@dataclass(frozen=True)
class Timing:
    """A line of timing.jsonl: the seconds that a round took."""

    round: int
    total: NonNegative


@dataclass(frozen=True)
class DeviceError:
    """A line of errors.jsonl."""

    round: int
    device: int
    error: str


@dataclass(frozen=True)
class Stopped:
    """Why a run ended before its last planned round."""

    reason: str


@dataclass(frozen=True)
class Promise:
    """What a run with differential privacy has spent."""

    delta: Share
    accountant: str
    epsilon: NonNegative | None = None
    """None without noise."""
    guarantee: str = ""
    """Why there is none, if there is none."""


@dataclass(frozen=True)
class Summary:
    """summary.json, which exists only if the run is finished."""

    parameters: dict[str, int]
    """Tier -> number of parameters."""
    operations: dict[str, int] = field(default_factory=dict)
    """Tier -> operations of one example; empty in runs from before they were counted."""
    training_operations: dict[str, Count] = field(default_factory=dict)
    """Tier -> operations of one example in training; empty in runs from before they were counted."""
    examples: list[Count] = field(default_factory=list)
    """The number of training examples of each device; empty in bounded and private runs, and in older ones."""
    tier_examples: dict[str, Count] = field(default_factory=dict)
    """Tier -> their sum, in bounded runs."""
    phases: list[TrainingPhase] = field(default_factory=list)
    """What a device does in a round; empty if it is `training.epochs` with `training_operations`."""
    rounds: int = 0
    """The rounds that were played."""
    privacy: Promise | None = None
    stopped: Stopped | None = None
    """None if all planned rounds were played."""
    best_rounds: dict[str, dict[str, int]] = field(default_factory=dict)
    """Owner -> tier -> the round whose model was kept as the best; empty if none was."""
    final: Values = field(default_factory=dict)
    """The primary metric of the last evaluated round; empty if the run was never evaluated."""
    metrics: list[MetricInfo] = field(default_factory=list)
    """The metrics, the primary one first; empty in runs that record accuracy alone, from before there were others."""
    dropped: int = 0
    failed: int = 0
    late: int = 0


@dataclass(frozen=True)
class Subject:
    """What environment.json says about what was learned; empty in runs from before it was recorded."""

    task: str = ""
    """The task's name."""
    data_digest: str = ""
    """A checksum of the data set, the same for all splits and seeds; empty if a real fleet played the run."""


@dataclass(frozen=True)
class EvaluationSettings:
    """[evaluation] of config.toml."""

    every: Positive = 1
    devices: bool = True


@dataclass(frozen=True)
class LocalSettings:
    """[local] of config.toml."""

    name: str = "plain"


@dataclass(frozen=True)
class PersonalSettings:
    """[personal] of config.toml."""

    name: str = "none"


@dataclass(frozen=True)
class DataSettings:
    """[data] of config.toml."""

    name: str = "data"
    fraction: NonNegative = 1.0


@dataclass(frozen=True)
class DevicesSettings:
    """[devices] of config.toml."""

    number: Positive = 100
    tiers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TrainingSettings:
    """[training] of config.toml."""

    epochs: Positive = 5
    batch_size: Positive = 50
    max_steps: Count = 0
    last_batch: str = "keep"


@dataclass(frozen=True)
class ClockSettings:
    """[clock] of config.toml."""

    profile: str = ""
    deadline_seconds: NonNegative = 0.0
    spare_devices: Count = 0


@dataclass(frozen=True)
class Settings:
    """The settings of config.toml that reports interpret; the others are only compared and printed."""

    recipe: str
    method: str
    seed: int
    rounds: Positive
    tiers: dict[str, NonNegative]
    """Tier -> share of the devices, shallowest first."""
    evaluation: EvaluationSettings = EvaluationSettings()
    local: LocalSettings = LocalSettings()
    personal: PersonalSettings = PersonalSettings()
    data: DataSettings = DataSettings()
    devices: DevicesSettings = DevicesSettings()
    training: TrainingSettings = TrainingSettings()
    clock: ClockSettings = ClockSettings()
    targets: dict[str, list[float]] = field(default_factory=dict)


def parse_record(cls: type[Record], values: Any) -> Record:
    """Builds a record from parsed JSON or TOML. Unknown keys are ignored.

    Raises KeyError for a missing key, TypeError for a wrong type, and ValueError for a number out of bounds.
    """
    check_mapping(values)
    found = {}
    known: Any = cls  # for mypy, type[Record] is not hashable
    for name, (hint, required) in _list_fields(known).items():
        if required or name in values:
            try:
                found[name] = _parse(hint, values[name])
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from None
    return cls(**found)


@cache
def _list_fields(cls: type) -> Mapping[str, tuple[Any, bool]]:
    """Field name -> its type, and whether it must be there."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        item.name: (hints[item.name], item.default is MISSING and item.default_factory is MISSING)
        for item in fields(cls)
    }


def _parse(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return check_number(_parse(arguments[0], value), *arguments[1:])
    if origin is dict:
        return {name: _parse(arguments[1], each) for name, each in check_mapping(value).items()}
    if origin is list:
        if not isinstance(value, list):
            raise TypeError(f"{str(value)[:40]!r} is not a list")
        return [_parse(arguments[0], each) for each in value]
    if type(None) in arguments:
        return None if value is None else _parse(arguments[0], value)
    if isinstance(hint, type) and is_dataclass(hint):
        return parse_record(hint, value)
    if hint is bool:
        if not isinstance(value, bool):
            raise TypeError(f"{str(value)[:40]!r} is not true or false")
        return value
    return {int: check_int, float: _check_float, str: check_text}[hint](value)


def _check_float(value: Any) -> float:
    # A metric or a loss may be any finite number.
    return check_number(value, -sys.float_info.max, sys.float_info.max)
