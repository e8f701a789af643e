"""What the files of a run folder hold, as records whose types and bounds are checked when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from fedhen.fileio.untrusted import MOST, check_int, check_mapping, check_number, check_text

Positive = Annotated[int, 1, MOST]
NonNegative = Annotated[float, 0, MOST]
Percent = Annotated[float, 0, 100]
Share = Annotated[float, 0, 1]
Scores = dict[str, dict[str, Share]]
"""Owner ("devices" or "server") -> tier -> accuracy."""

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
    accuracy: Scores = field(default_factory=dict)
    """Empty if the round was not evaluated."""
    ensemble: Scores = field(default_factory=dict)
    """Accuracy of all exits together; empty if it was not asked for."""
    distance: dict[str, float] | None = None
    """Tier -> distance between its server model and the deepest tier's."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the record as it is written, without the keys that it leaves out."""
        absent = [name for name in ("failed", "late", "accuracy", "ensemble") if not getattr(self, name)]
        absent += ["distance"] * (self.distance is None)
        return {name: value for name, value in asdict(self).items() if name not in absent}


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
class Summary:
    """summary.json, which exists only if the run is finished."""

    parameters: dict[str, int]
    """Tier -> number of parameters."""
    final: Scores = field(default_factory=dict)
    """Empty if the run was never evaluated."""
    dropped: int = 0
    failed: int = 0
    late: int = 0


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
class DataSettings:
    """[data] of config.toml."""

    fraction: NonNegative = 1.0


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
    data: DataSettings = DataSettings()
    targets: dict[str, list[Percent]] = field(default_factory=dict)


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
    return check_number(value, least=-MOST)
