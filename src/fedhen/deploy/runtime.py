"""Opens an export and runs its files. ONNX files need onnxruntime and numpy alone.

Nothing in the folder is trusted: a file is read once, its checksum is compared with the manifest's, and what was read
is run. Inputs are checked against the manifest before a runtime sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedhen.deploy.manifest import LARGEST_SIDE, FileRecord, InputRecord, Manifest, read_manifest
from fedhen.deploy.protobuf import has_external_data
from fedhen.deploy.versions import require_executorch, require_onnx
from fedhen.errors import CheckpointError, DataError, FedhenError, one_line, unknown_name

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = Mapping[str, Array]
MOST_BYTES = 1 << 33
"""A larger file is not read."""


class Session(Protocol):
    """A loaded file: named inputs -> outputs in their order."""

    def __call__(self, inputs: Arrays) -> list[Array]: ...


class OnnxSession:
    """An ONNX file in onnxruntime, on one thread."""

    def __init__(self, content: bytes, name: str) -> None:
        require_onnx("running this file", ("onnxruntime",))
        import onnxruntime

        try:
            if has_external_data(content):
                raise CheckpointError(f"{name} refers to data in another file: it is not an export of fedhen's")
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            options.log_severity_level = 4
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except FedhenError:
            raise
        except Exception as error:  # the runtime answers damaged files with nearly anything
            raise CheckpointError(f"{name} cannot be loaded: {_first_line(error)}") from None
        self.name = name

    def __call__(self, inputs: Arrays) -> list[Array]:
        try:
            return list(self._session.run(None, dict(inputs)))
        except Exception as error:
            raise DataError(f"{self.name} fails on these inputs: {_first_line(error)}") from None


class ExecutorchSession:
    """A method of an ExecuTorch file, which takes one example at a time."""

    def __init__(self, content: bytes, name: str, method: str = "forward") -> None:
        require_executorch()
        from fedhen.deploy.quiet import quiet

        with quiet():
            from executorch.runtime import Runtime, Verification

            try:
                program = Runtime.get().load_program(content, verification=Verification.InternalConsistency)
                self._method: Any = program.load_method(method)
            except Exception as error:
                raise CheckpointError(f"{name} cannot be loaded: {_first_line(error)}") from None
        self._program, self.name = program, name

    def __call__(self, inputs: Arrays) -> list[Array]:
        import torch

        rows = []
        for place in range(len(next(iter(inputs.values())))):
            example = [torch.from_numpy(np.ascontiguousarray(a[place : place + 1])) for a in inputs.values()]
            try:
                # Results are views into the runtime's memory.
                rows.append([output.clone().numpy() for output in self._method.execute(example)])
            except Exception as error:
                raise DataError(f"{self.name} fails on these inputs: {_first_line(error)}") from None
        return [np.concatenate(column) for column in zip(*rows, strict=True)]


def open_session(content: bytes, name: str, target: str) -> Session:
    """Loads a file in the runtime of its target."""
    return OnnxSession(content, name) if target == "onnx" else ExecutorchSession(content, name)


@dataclass(frozen=True)
class Answer:
    """What a file says about a batch."""

    output: Array
    """Of the exit that each example took."""
    exits: list[str]
    """The exit that each example took."""


@dataclass(frozen=True)
class Export:
    """An export that was opened."""

    folder: Path
    manifest: Manifest

    def choose_file(self, tier: str | None = None, cascade: bool = False, int8: bool = False) -> FileRecord:
        """Returns the file of a tier, by default of the last, or its cascade."""
        wanted = "cascade" if cascade else "model"
        files = [file for file in self.manifest.files if file.kind == wanted and bool(file.quantisation) == int8]
        if not files:
            kind = f"{'int8 ' if int8 else ''}{wanted}"
            why = f": {self.manifest.no_cascade}" if cascade and self.manifest.no_cascade else ""
            raise FedhenError(f"{self.folder} has no {kind}{why}")
        known = [file.tier for file in files]
        if tier is not None and tier not in known:
            raise unknown_name("tier", tier, known)
        return next(file for file in reversed(files) if tier in (None, file.tier))

    def open(self, file: FileRecord) -> Session:
        """Loads a file, after its checksum is checked."""
        return open_session(read_checked(self.folder, file), file.name, file.target)

    def predict(
        self, inputs: object, tier: str | None = None, threshold: float | None = None, int8: bool = False
    ) -> Answer:
        """Predicts a batch: an array, or a mapping of arrays by name.

        With a tier, or if there is no cascade, the answer is that tier's last exit; else that of the exit taken.
        """
        has_cascade = any(file.kind == "cascade" for file in self.manifest.files)
        cascade = threshold is not None or (tier is None and has_cascade)
        if cascade and tier is not None and has_cascade and tier != self.choose_file(cascade=True, int8=int8).tier:
            raise FedhenError(f"tier {tier!r} has no cascade: leave out the threshold")
        file = self.choose_file(tier, cascade, int8)
        arrays = check_inputs(inputs, file.inputs)
        session = self.open(file)
        number, last = len(next(iter(arrays.values()))), len(file.exits) - 1
        if file.kind == "model":
            found = session(arrays)
            return _read_answer([found[-1], np.full(number, last)] if found else [], file, number)
        given = {} if threshold is None else {"threshold": np.array(threshold, np.float32)}
        return _read_answer(session({**arrays, **given}), file, number)


def open_export(folder: Path) -> Export:
    """Opens an export. Raises a CheckpointError if its manifest is missing or damaged."""
    return Export(folder, read_manifest(folder))


def read_checked(folder: Path, file: FileRecord) -> bytes:
    """Returns the content of a file. Raises a CheckpointError unless it is what the manifest says."""
    path = folder / file.name
    try:
        # A link could lead anywhere.
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path} does not exist: export the run again")
        if path.stat().st_size != file.bytes or file.bytes > MOST_BYTES:
            raise CheckpointError(f"{path} is damaged: it has {path.stat().st_size} bytes, and had {file.bytes}")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if sha256(content).hexdigest() != file.sha256:
        raise CheckpointError(f"{path} is damaged: its checksum is not the manifest's; export the run again")
    return content


def check_inputs(inputs: object, described: Sequence[InputRecord]) -> dict[str, Array]:
    """Returns the inputs by name. Raises a DataError for a wrong name, type, shape or value."""
    given = inputs if isinstance(inputs, Mapping) else {described[0].name: inputs}
    names = [record.name for record in described]
    for name in given:
        if name not in names:
            raise unknown_name("input", name, names)
    if missing := [name for name in names if name not in given]:
        raise DataError(f"input {missing[0]!r} is missing: the model takes {', '.join(names)}")
    found = {record.name: _check_input(np.asarray(given[record.name]), record) for record in described}
    if len({len(array) for array in found.values()}) > 1:
        each = ", ".join(f"{name} has {len(array)}" for name, array in found.items())
        raise DataError(f"the inputs have unequal numbers of examples: {each}")
    return found


def _check_input(array: Array, record: InputRecord) -> Array:
    what, wanted = f"input {record.name!r}", tuple(record.shape)
    if array.dtype.name != record.type:
        raise DataError(f"{what} is {array.dtype.name}: the model takes {record.type}")
    if any(side > LARGEST_SIDE for side in array.shape[1:]):
        raise DataError(f"{what} has shape {array.shape}: no side may be over {LARGEST_SIDE}")
    if array.shape[1:] != wanted or array.ndim != len(wanted) + 1:
        raise DataError(f"{what} has shape {array.shape}: the model takes (examples, {', '.join(map(str, wanted))})")
    if not len(array):
        raise DataError(f"{what} is empty: give at least one example")
    if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
        raise DataError(f"{what} holds NaN or infinity")
    return np.array(array, order="C")  # in memory: a file may be mapped


def _read_answer(found: Sequence[Array], file: FileRecord, examples: int) -> Answer:
    """Returns what a file found. Raises a CheckpointError if that is no output and no exit for each example."""
    if len(found) == 2 and all(each.ndim and len(each) == examples for each in found):
        output, exits = found
        if exits.dtype.kind == "i" and exits.ndim == 1 and set(exits.tolist()) <= {*range(len(file.exits))}:
            return Answer(output, [file.exits[place] for place in exits])
    raise CheckpointError(f"{file.name} does not answer as its manifest says: export the run again")


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return one_line(lines[0] if lines else type(error).__name__)[:200]
