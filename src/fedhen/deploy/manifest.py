"""The manifest of an export: what its files are, as records whose types and bounds are checked when they are read."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

from fedhen.errors import CheckpointError, ConfigError, one_line
from fedhen.fileio import untrusted
from fedhen.runs.records import NonNegative, Positive, Share, parse_record

MANIFEST = "manifest.json"
CARD = "README.md"
FORMAT = 1
NEVER = 2.0
"""The threshold that no confidence reaches. 1 is one that float32 does reach."""
LARGEST_SIDE = 1 << 16
"""The longest side of an input."""
TYPES = ("float32", "float64", "float16", "uint8", "int8", "int16", "int32", "int64", "bool")


@dataclass(frozen=True, kw_only=True)
class InputRecord:
    """An input of a file."""

    name: str
    type: str
    shape: list[int]
    """Of one example."""
    batch: int = 0
    """The number of examples that the file takes at once; 0 for any."""

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ValueError(f"the type of input {self.name[:40]!r} is {self.type[:40]!r}")
        if any(not 0 < side <= LARGEST_SIDE for side in self.shape) or len(self.shape) > 8:
            raise ValueError(f"the shape of input {self.name[:40]!r} is {self.shape[:8]}")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How a file's outputs compare with the model's."""

    examples: Positive
    batches: list[int]
    """The batch sizes that were tried."""
    difference: NonNegative
    """The largest absolute difference of an output."""
    tolerance: NonNegative
    same: Share
    """The share of examples, or of their positions, with the same largest output."""


@dataclass(frozen=True)
class MethodRecord:
    """A method of an ExecuTorch file: the values that it takes and gives, in order."""

    takes: list[str]
    gives: list[str]


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of an export."""

    name: str
    kind: str
    """`model` has an output for each exit, `cascade` the output of the exit taken."""
    tier: str
    target: str
    """`onnx` or `executorch`."""
    bytes: Positive
    sha256: str
    exits: list[str]
    """The tiers that its exits are named after, shallowest first."""
    inputs: list[InputRecord]
    outputs: list[str]
    methods: dict[str, MethodRecord] = field(default_factory=dict)
    """Of an ExecuTorch file: `forward` for all exits, then those that run the stages one by one."""
    quantisation: str = ""
    agreement: Agreement
    score: dict[str, float | None] = field(default_factory=dict)
    """Exit, or `cascade` -> the primary metric of the file on the test set."""
    score_of_model: dict[str, float | None] = field(default_factory=dict)
    weights: str = ""
    """SHA-256 of the weights: of shape, type and bytes of one after the other."""

    def __post_init__(self) -> None:
        path = PurePath(self.name)
        if len(path.parts) != 1 or path.name != self.name or self.name in ("", ".", "..") or "\\" in self.name:
            raise ValueError(f"the file {one_line(self.name)[:60]!r} is not in the folder")
        if self.kind not in ("model", "cascade") or self.target not in ("onnx", "executorch"):
            raise ValueError(f"{self.name}: unknown kind or target")
        if not self.inputs or not self.exits:
            raise ValueError(f"{self.name} has no inputs or no exits")
        if self.kind == "cascade" and len(self.exits) < 2:
            raise ValueError(f"{self.name} is a cascade with one exit")


@dataclass(frozen=True, kw_only=True)
class ThresholdRow:
    """What a threshold gives."""

    threshold: NonNegative
    early: Share
    """The share of examples that leave before the last exit."""
    score: float | None
    operations: Share
    """Of those of a pass through the whole model."""


@dataclass(frozen=True, kw_only=True)
class ExitStudy:
    """What early exits give on the test set."""

    examples: Positive
    score: dict[str, float | None]
    """Exit -> the primary metric."""
    operations: dict[str, int]
    """Exit -> operations of one example that leaves there."""
    overthinking: Share | None = None
    """The share of examples that the first exit has right and the last one wrong."""
    chosen: float = NEVER
    """The smallest threshold without loss on one half of the examples."""
    held_out: ThresholdRow | None = None
    """What it gives on the other half."""
    last_on_held_out: float | None = None
    """What the last exit gives there."""
    table: list[ThresholdRow] = field(default_factory=list)
    """On all examples: not a promise, since a threshold chosen from it has seen them."""


@dataclass(frozen=True, kw_only=True)
class Cascade:
    """The early exits of the last tier's model."""

    threshold: NonNegative
    rule: str
    """`given`, `default` or `auto`."""
    study: ExitStudy | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Manifest:
    """manifest.json, which is written last."""

    format: Positive
    versions: dict[str, str]
    run: dict[str, str]
    task: str
    metric: str
    classes: list[str] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
    """The normalisation that is part of every file."""
    columns: list[str] = field(default_factory=list)
    """Of a model of a table: the names of the numbers in a row, in order."""
    unit: str = ""
    """The unit of predicted numbers."""
    examples: str
    """`test` or `random`: what the files were checked on."""
    operations: dict[str, int] = field(default_factory=dict)
    """Tier -> operations of one example."""
    cascade: Cascade | None = None
    no_cascade: str = ""
    """Why there is none."""
    files: list[FileRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"its format is {self.format}, and this version reads {FORMAT}")
        if not self.files:
            raise ValueError("it lists no files")

    def __repr__(self) -> str:
        name = ", ".join(filter(None, (self.run.get("recipe"), self.run.get("method"))))
        files = ", ".join(f"{file.name} ({file.bytes:,} bytes)" for file in self.files)
        return f"<Export of {name or 'a model'}: {files}>"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_threshold(given: float | str) -> float:
    """Returns a threshold from 0 to 1, or that of `never`, which no confidence reaches."""
    if given == "never":
        return NEVER
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not (0 <= value <= 1 or (value == NEVER and not isinstance(given, str))):
        raise ConfigError(f"threshold {given!r}: give a number from 0 to 1, or 'never'")
    return value


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of an export. Raises a CheckpointError if it is missing or damaged."""
    try:
        values = untrusted.read_json(folder / MANIFEST)
        if values is None:
            raise CheckpointError(f"{folder} is not an export: it has no {MANIFEST}")
        return parse_record(Manifest, values)
    except CheckpointError:
        raise
    except (OSError, *untrusted.PARSE_ERRORS) as error:
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged: {one_line(untrusted.describe_error(error))}: export the run again"
        ) from None
