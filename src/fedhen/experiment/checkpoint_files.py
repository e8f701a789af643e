"""Reads and writes checkpoints: tensors in safetensors and a JSON manifest. Nothing in them is executed.

round-000012.safetensors   the tensors
round-000012.json          the manifest, written when the tensors are on the disk; without it a checkpoint is ignored
start.safetensors, .json   what the run started from, which all of them need

Checksums cover every byte: the manifest has the SHA-256 of the tensors' file, and one of itself.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedhen.fileio.atomic import PART, replace_file, sync_folder
from fedhen.params import SAFETENSORS_TYPES

FOLDER = "checkpoints"
FORMAT = 1
START = 0
"""The number of what a run started from. It is not among the checkpoints of rounds, and is never removed."""
KEPT = 2
"""Checkpoints that are kept: the newest, and one in case it is damaged."""
SPARE = 2**16
"""Bytes of the disk that a checkpoint leaves free."""
LONGEST_MANIFEST = 64 * 2**20
"""Bytes. A larger file is refused."""


class DamagedCheckpoint(Exception):
    """Raised if a checkpoint must not be used, with the reason."""


class TensorSpec(NamedTuple):
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    type: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.type.itemsize


class Entry(NamedTuple):
    """A tensor to save. It is fetched just before it is written, so that not all need to fit into memory."""

    name: str
    kind: TensorSpec
    fetch: Callable[[], Tensor]


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def write_checkpoint(place: Path, number: int, entries: Sequence[Entry], about: Mapping[str, Any]) -> None:
    """Writes the checkpoint of a round, then removes the oldest.

    All entries are fetched even if writing fails, because other ranks may be sending them.
    """
    failed: OSError | None = None
    try:
        place.mkdir(exist_ok=True)
        _clean(place)
        target = _tensors_path(place, number)
        partial_file = target.with_name(target.name + PART)
        _check_free_space(place, sum(entry.kind.bytes for entry in entries))
        with partial_file.open("wb") as file:
            checksum, size, failed = _write_tensors(file, entries)
        if failed is None:
            partial_file.replace(target)
            sync_folder(place)
            manifest = {"format": FORMAT, "round": number, "bytes": size, "sha256": checksum, **about}
            replace_file(_manifest_path(place, number), _render_manifest(manifest))
            keep_newest(place, KEPT)
    except OSError as error:
        failed = error
    if failed is not None:
        with contextlib.suppress(OSError):
            _clean(place)
        raise failed


def _check_free_space(place: Path, needed: int) -> None:
    # A checkpoint that does not fit would fill the disk, and the records of the run could not be written either.
    if shutil.disk_usage(place).free < needed + SPARE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write_tensors(file: IO[bytes], entries: Sequence[Entry]) -> tuple[str, int, OSError | None]:
    """Writes the tensors in safetensors' format. Returns the checksum, the size, and the error, if any."""
    summed, failed = hashlib.sha256(), None
    size = 0
    for part in _encode_tensors(entries):
        if failed is not None:
            continue
        try:
            file.write(part)
            summed.update(part)
            size += len(part)
        except OSError as error:
            failed = error
            with contextlib.suppress(OSError):
                # The run needs the free space for its records.
                os.ftruncate(file.fileno(), 0)
    if failed is None:
        file.flush()
        os.fsync(file.fileno())
    return summed.hexdigest(), size, failed


def _encode_tensors(entries: Sequence[Entry]) -> Iterable[memoryview]:
    header: dict[str, Any] = {}
    end = 0
    for name, kind, _ in entries:
        header[name] = {
            "dtype": SAFETENSORS_TYPES[kind.type],
            "shape": list(kind.shape),
            "data_offsets": [end, end := end + kind.bytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, kind, fetch in entries:
        tensor = fetch()
        assert spec_of(tensor) == kind
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def list_rounds(place: Path) -> list[int]:
    """Returns the rounds that have a checkpoint, the newest first."""
    names = [path.name for path in place.iterdir()] if place.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"round-(\d{6,12})\.json", name)))[::-1]


def has_checkpoint(place: Path, number: int) -> bool:
    return _manifest_path(place, number).is_file()


def keep_newest(place: Path, number: int) -> None:
    """Removes all but the newest checkpoints. Manifests are removed first, so that none is left without its tensors."""
    for old in list_rounds(place)[number:]:
        _manifest_path(place, old).unlink(missing_ok=True)
        _tensors_path(place, old).unlink(missing_ok=True)


def discard_later(place: Path, after: int = 0) -> None:
    """Removes the checkpoints of later rounds, and partial files of a crash."""
    if place.is_dir():
        for number in list_rounds(place):
            if number > after:
                _manifest_path(place, number).unlink(missing_ok=True)
        _clean(place)


def _clean(place: Path) -> None:
    """Removes checkpoint files without a manifest, which a crash left."""
    whole = {_tensors_path(place, number).name for number in (START, *list_rounds(place))}
    for path in place.iterdir():
        if re.fullmatch(rf"(round-\d{{6,12}}|start)\.(safetensors|json)({re.escape(PART)})?", path.name) and (
            path.name.endswith(PART) or (path.suffix == ".safetensors" and path.name not in whole)
        ):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums are right. Its contents must still be compared with what the run expects."""

    place: Path
    manifest: Mapping[str, Any]

    @property
    def round(self) -> int:
        return int(self.manifest["round"])

    def open(self) -> None:
        """Opens the tensors. From then on they can be read even if the file is removed."""
        self._file  # noqa: B018

    @cached_property
    def _file(self) -> Any:
        try:
            return safe_open(_tensors_path(self.place, self.round), framework="pt")
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"its tensors cannot be read: {error}") from None

    def kinds(self) -> dict[str, tuple[list[int], str]]:
        """Returns name -> shape and type of every tensor, from the header of the file."""
        found = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
        return {name: (list(part.get_shape()), str(part.get_dtype())) for name, part in found.items()}

    def check(self, expected: Mapping[str, TensorSpec]) -> None:
        """Raises DamagedCheckpoint unless it has exactly these tensors, with these shapes and types."""
        found = self.kinds()
        if odd := sorted(found.keys() ^ expected.keys()):
            raise DamagedCheckpoint(f"tensor {odd[0]!r} is {'unexpected' if odd[0] in found else 'missing'}")
        for name, kind in expected.items():
            if found[name] != (list(kind.shape), SAFETENSORS_TYPES[kind.type]):
                raise DamagedCheckpoint(f"tensor {name!r} has a different shape or type than in this run")

    def tensor(self, name: str) -> Tensor:
        """Returns a copy of a tensor."""
        tensor: Tensor = self._file.get_tensor(name).clone()
        return tensor


def open_checkpoint(place: Path, number: int) -> Checkpoint:
    """Opens the checkpoint of a round. Raises DamagedCheckpoint unless every byte is as it was written."""
    path = _manifest_path(place, number)
    try:
        if path.stat().st_size > LONGEST_MANIFEST:
            raise DamagedCheckpoint("its manifest is too long")
        text = path.read_bytes()
        manifest = json.loads(text)
        if (
            not isinstance(manifest, dict)
            or _render_manifest({k: v for k, v in manifest.items() if k != "check"}) != text
        ):
            raise DamagedCheckpoint("the checksum of its manifest is wrong")
        if manifest["format"] != FORMAT or manifest["round"] != number:
            raise DamagedCheckpoint(f"its manifest has format {manifest['format']} and round {manifest['round']}")
        with _tensors_path(place, number).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != manifest["bytes"]:
                raise DamagedCheckpoint(f"its tensors have {size} bytes instead of {manifest['bytes']}")
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest["sha256"]:
                raise DamagedCheckpoint("the checksum of its tensors is wrong")
    except OSError as error:
        raise DamagedCheckpoint(f"it cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedCheckpoint("its manifest is malformed") from None
    return Checkpoint(place, manifest)


def _render_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a manifest, with its checksum at the end."""
    body = json.dumps(manifest, indent=1)
    check = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps({**manifest, "check": check}, indent=1) + "\n").encode()


def _stem(number: int) -> str:
    return f"round-{number:06}" if number != START else "start"


def _tensors_path(place: Path, number: int) -> Path:
    return place / f"{_stem(number)}.safetensors"


def _manifest_path(place: Path, number: int) -> Path:
    return place / f"{_stem(number)}.json"
