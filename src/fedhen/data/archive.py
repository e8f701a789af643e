"""Puts the files of a published data set into the data folder, from a download or a folder; every file is verified."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO

from fedhen.data.published import Files, kind_of
from fedhen.data.storage import (
    CHUNK,
    digest,
    explain_read_errors,
    explain_write_errors,
    hasher,
    make_folder,
    open_file,
    write,
)
from fedhen.errors import DataError


def unpack(files: Files, archive: Path, root: Path) -> Path:
    """Verifies an archive and writes its data files below `root`. Returns their folder.

    An archive with the published checksum is the authors' own, so that its members need no checks. The checksum that
    they publish is an MD5: a second file with the MD5 of a given one cannot be made, only two new files with the same.
    A data file that is published without an archive is copied.
    """
    with explain_read_errors(archive):
        kind = kind_of(files.checksum)
        if (found := digest(archive, kind)) != files.checksum:
            raise DataError(
                f"{archive} is not the official {files.archive}: its {kind} is {found}, not {files.checksum}"
            )
    with _stage(files, root, archive) as stage, explain_read_errors(archive):
        if files.packed:
            _extract(files, archive, stage)
        else:
            with archive.open("rb") as file:
                _copy(files, file, stage / files.archive, str(archive))
    return root / files.folder


def _extract(files: Files, archive: Path, stage: Path) -> None:
    with tarfile.open(archive, "r|gz") as tar:
        for member in tar:
            name = PurePosixPath(member.name)
            wanted = name.parent == PurePosixPath(files.folder) and name.name in files.checksums
            if wanted and (content := tar.extractfile(member)):
                _copy(files, content, stage / name.name, f"{archive}: {name}")


def take(files: Files, source: Path, root: Path) -> Path:
    """Verifies the archive or folder that a user has and copies its data files below `root`. Returns their folder."""
    with explain_read_errors(source):
        if source.is_file():
            return unpack(files, source, root)
        if not source.is_dir():
            raise DataError(f"{source} does not exist: name {files.archive}, or the folder {files.folder}")
        folder = source / files.folder if (source / files.folder).is_dir() else source
        present = [folder / name for name in files.checksums if (folder / name).is_file()]
    with _stage(files, root, folder) as stage:
        for path in present:
            with explain_read_errors(path), path.open("rb") as file:
                _copy(files, file, stage / path.name, str(path))
    return root / files.folder


@contextmanager
def _stage(files: Files, root: Path, source: Path) -> Iterator[Path]:
    """Yields a temporary folder. Its files are renamed to their places once all of them are there."""
    make_folder(root)
    with explain_write_errors(root), TemporaryDirectory(dir=root, prefix=".fedhen-") as stage:
        yield Path(stage)
        if missing := [name for name in files.checksums if not (Path(stage) / name).exists()]:
            form = " in binary form" if files.labels else ""
            raise DataError(f"{source} lacks {', '.join(missing)}: it is not the whole {files.name}{form}")
        (root / files.folder).mkdir(exist_ok=True)
        for name in files.checksums:
            (Path(stage) / name).replace(root / files.folder / name)


def _copy(files: Files, source: IO[bytes], target: Path, label: str) -> None:
    """Copies a data file. Raises a DataError if it is not the published one, after at most the size of that one."""
    kind, size = kind_of(expected := files.checksums[target.name]), files.sizes[target.name]
    checksum = hasher(kind)
    left = size
    with open_file(target) as file:
        while left and (chunk := source.read(min(left, CHUNK))):
            checksum.update(chunk)
            left -= len(chunk)
            write(file, chunk, target.parent.parent)
    if left or source.read(1):
        raise DataError(f"{label} has {'fewer' if left else 'more'} than {size} bytes: it is not the published file")
    if checksum.hexdigest() != expected:
        raise DataError(f"{label} was altered: its {kind} is not the published one")
