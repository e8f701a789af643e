"""Checkpoints as files: tensors in safetensors, a JSON manifest with checksums, and nothing that is ever executed.

round-000012.safetensors   the tensors
round-000012.json          written when the tensors are safe on the disk: a checkpoint without it does not count

Every byte of both is covered: the manifest has the SHA-256 of the tensors' file, and one of itself.
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
KEPT = 2
"""How many are kept: the newest, and one to fall back to."""
SPARE = 2**16
"""Bytes that a checkpoint leaves free."""
LONGEST_MANIFEST = 64 * 2**20
"""Bytes; a larger file is no manifest."""


class DamagedCheckpoint(Exception):
    """A checkpoint that must not be used, and why."""


class TensorSpec(NamedTuple):
    """What a tensor is before it is read."""

    shape: tuple[int, ...]
    type: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.type.itemsize


class Entry(NamedTuple):
    """A tensor to be saved: it is fetched when its turn comes, so that they need not fit the memory together."""

    name: str
    kind: TensorSpec
    fetch: Callable[[], Tensor]


def spec_of(tensor: Tensor) -> TensorSpec:
    """The kind of a tensor at hand."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def write_checkpoint(place: Path, number: int, entries: Sequence[Entry], about: Mapping[str, Any]) -> None:
    """Write the checkpoint of a round, then remove the oldest; all entries are fetched even where writing fails.

    Others may be sending what is fetched here.
    """
    failed: OSError | None = None
    try:
        place.mkdir(exist_ok=True)
        _clean(place)
        target = _tensors(place, number)
        beside = target.with_name(target.name + PART)
        _check_room(place, sum(entry.kind.bytes for entry in entries))
        with beside.open("wb") as file:
            summed, size, failed = _written(file, entries)
        if failed is None:
            beside.replace(target)
            sync_folder(place)
            manifest = {"format": FORMAT, "round": number, "bytes": size, "sha256": summed, **about}
            replace_file(_manifest(place, number), _rendered(manifest))
            keep_newest(place, KEPT)
    except OSError as error:
        failed = error
    if failed is not None:
        with contextlib.suppress(OSError):
            _clean(place)
        raise failed


def _check_room(place: Path, needed: int) -> None:
    """What cannot fit is not begun: until that showed, it would take the last room from the run's own records."""
    if shutil.disk_usage(place).free < needed + SPARE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _written(file: IO[bytes], entries: Sequence[Entry]) -> tuple[str, int, OSError | None]:
    """The tensors in safetensors' format, through to the disk; their checksum and size, and what went wrong."""
    summed, failed = hashlib.sha256(), None
    size = 0
    for part in _parts(entries):
        if failed is not None:
            continue
        try:
            file.write(part)
            summed.update(part)
            size += len(part)
        except OSError as error:
            failed = error
            with contextlib.suppress(OSError):
                # The run beside needs the room that is left.
                os.ftruncate(file.fileno(), 0)
    if failed is None:
        file.flush()
        os.fsync(file.fileno())
    return summed.hexdigest(), size, failed


def _parts(entries: Sequence[Entry]) -> Iterable[memoryview]:
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
    """The rounds that have a checkpoint, the newest first."""
    names = [path.name for path in place.iterdir()] if place.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"round-(\d{6,12})\.json", name)))[::-1]


def keep_newest(place: Path, number: int) -> None:
    """Remove all but so many of the newest; a manifest goes first, so that none ever lacks its tensors."""
    for old in list_rounds(place)[number:]:
        _manifest(place, old).unlink(missing_ok=True)
        _tensors(place, old).unlink(missing_ok=True)


def discard_later(place: Path, after: int = 0) -> None:
    """Remove those of later rounds, and what a crash left behind."""
    if place.is_dir():
        for number in list_rounds(place):
            if number > after:
                _manifest(place, number).unlink(missing_ok=True)
        _clean(place)


def _clean(place: Path) -> None:
    """Remove files of ours that no manifest names: a crash came before it was written."""
    whole = {_tensors(place, number).name for number in list_rounds(place)}
    for path in place.iterdir():
        if re.fullmatch(rf"round-\d{{6,12}}\.(safetensors|json)({re.escape(PART)})?", path.name) and (
            path.name.endswith(PART) or (path.suffix == ".safetensors" and path.name not in whole)
        ):
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose checksums are right; what it says must still be compared with what is expected."""

    place: Path
    manifest: Mapping[str, Any]

    @property
    def round(self) -> int:
        """The last round that it holds."""
        return int(self.manifest["round"])

    @cached_property
    def _file(self) -> Any:
        try:
            return safe_open(_tensors(self.place, self.round), framework="pt")
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"its tensors cannot be read: {error}") from None

    def kinds(self) -> dict[str, tuple[list[int], str]]:
        """Name -> shape and type of every tensor, by the file's header."""
        found = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
        return {name: (list(part.get_shape()), str(part.get_dtype())) for name, part in found.items()}

    def check(self, expected: Mapping[str, TensorSpec]) -> None:
        """Refuse it unless it has just these tensors, of these shapes and types."""
        found = self.kinds()
        if odd := sorted(found.keys() ^ expected.keys()):
            raise DamagedCheckpoint(f"tensor {odd[0]!r} is {'unexpected' if odd[0] in found else 'missing'}")
        for name, kind in expected.items():
            if found[name] != (list(kind.shape), SAFETENSORS_TYPES[kind.type]):
                raise DamagedCheckpoint(f"tensor {name!r} has another shape or type than this run's")

    def tensor(self, name: str) -> Tensor:
        """A tensor, in memory of its own."""
        tensor: Tensor = self._file.get_tensor(name).clone()
        return tensor


def open_checkpoint(place: Path, number: int) -> Checkpoint:
    """The checkpoint of a round, every byte of it checked."""
    path = _manifest(place, number)
    try:
        if path.stat().st_size > LONGEST_MANIFEST:
            raise DamagedCheckpoint("its manifest is too long")
        text = path.read_bytes()
        manifest = json.loads(text)
        if not isinstance(manifest, dict) or _rendered({k: v for k, v in manifest.items() if k != "check"}) != text:
            raise DamagedCheckpoint("its manifest does not have its checksum")
        if manifest["format"] != FORMAT or manifest["round"] != number:
            raise DamagedCheckpoint(f"its manifest is of format {manifest['format']}, round {manifest['round']}")
        with _tensors(place, number).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != manifest["bytes"]:
                raise DamagedCheckpoint(f"its tensors are {size} bytes instead of {manifest['bytes']}")
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest["sha256"]:
                raise DamagedCheckpoint("its tensors do not have their checksum")
    except OSError as error:
        raise DamagedCheckpoint(f"it cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedCheckpoint("its manifest is not what a manifest is") from None
    return Checkpoint(place, manifest)


def _rendered(manifest: Mapping[str, Any]) -> bytes:
    """The manifest's bytes, its own checksum last."""
    body = json.dumps(manifest, indent=1)
    check = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps({**manifest, "check": check}, indent=1) + "\n").encode()


def _tensors(place: Path, number: int) -> Path:
    return place / f"round-{number:06}.safetensors"


def _manifest(place: Path, number: int) -> Path:
    return place / f"round-{number:06}.json"
