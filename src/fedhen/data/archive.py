"""From an archive or a folder to the data folder: whole, every file checked, and nothing besides."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO

from fedhen.data.published import Files
from fedhen.data.storage import CHUNK, digest, make_folder, open_file, reading, write, writing
from fedhen.errors import UserError

SLACK = 1 << 20
"""An archive is at most so much larger than its data files: label names, a read-me, tar's own blocks."""


def unpack(files: Files, archive: Path, root: Path) -> Path:
    """Write an archive's data files below `root`, once every member has proved harmless and every file right."""
    with _stage(files, root, archive) as stage, reading(archive):
        try:
            with _Limited(files, archive) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    _refuse(archive, member, stream.left)
                    name = PurePosixPath(member.name)
                    wanted = name.parent == PurePosixPath(files.folder) and name.name in files.sha1
                    if wanted and (content := tar.extractfile(member)):
                        _copy(files, content, stage / name.name, f"{archive}: {name}")
        except UserError:
            raise
        except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{archive} is not a whole .tar.gz archive ({reason}): get it again") from None
    return root / files.folder


class _Limited(gzip.GzipFile):
    """Refuses to give more than the data files and their trimmings: no bomb goes off behind it."""

    def __init__(self, files: Files, archive: Path) -> None:
        super().__init__(archive)
        self.left = sum(files.sizes.values()) + SLACK

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes."""
        content = super().read(size)
        self.left -= len(content)
        if self.left < 0:
            raise UserError(f"{self.name} is refused: it unpacks to more than the data it should hold")
        return content


def _refuse(archive: Path, member: tarfile.TarInfo, most: int) -> None:
    """Nothing but plain files and folders, all of them inside and of a size that can be."""
    parts = member.name.replace("\\", "/").split("/")
    if ".." in parts or not parts[0] or ":" in parts[0]:
        raise UserError(f"{archive} is refused: its member {member.name!r} leads out of the folder")
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
        raise UserError(f"{archive} is refused: its member {member.name!r} is a link or a device")
    if member.size > most:
        raise UserError(f"{archive} is refused: its member {member.name!r} is larger than the data it should hold")


def take(files: Files, source: Path, root: Path) -> Path:
    """The data files from an archive or a folder that the user has, checked and copied below `root`."""
    with reading(source):
        if source.is_file():
            if (found := digest(source, "md5")) != files.md5:
                raise UserError(f"{source} is not the official {files.archive}: its MD5 is {found}, not {files.md5}")
            return unpack(files, source, root)
        if not source.is_dir():
            raise UserError(f"{source} does not exist: name {files.archive}, or the folder {files.folder}")
        folder = source / files.folder if (source / files.folder).is_dir() else source
        present = [folder / name for name in files.sha1 if (folder / name).is_file()]
    with _stage(files, root, folder) as stage:
        for path in present:
            with reading(path), path.open("rb") as file:
                _copy(files, file, stage / path.name, str(path))
    return root / files.folder


@contextmanager
def _stage(files: Files, root: Path, source: Path) -> Iterator[Path]:
    """A passing folder whose files, once they are all there, are renamed to where they belong."""
    make_folder(root)
    with writing(root), TemporaryDirectory(dir=root, prefix=".fedhen-") as passing:
        yield Path(passing)
        if missing := [name for name in files.sha1 if not (Path(passing) / name).exists()]:
            raise UserError(f"{source} lacks {', '.join(missing)}: it is not the whole {files.name} in binary form")
        (root / files.folder).mkdir(exist_ok=True)
        for name in files.sha1:
            (Path(passing) / name).replace(root / files.folder / name)


def _copy(files: Files, source: IO[bytes], target: Path, label: str) -> None:
    """Copy a data file if it is the published one, and never more bytes than that has."""
    checksum, size = hashlib.sha1(usedforsecurity=False), files.sizes[target.name]
    left = size
    with open_file(target) as file:
        while left and (chunk := source.read(min(left, CHUNK))):
            checksum.update(chunk)
            left -= len(chunk)
            write(file, chunk, target.parent.parent)
    if left or source.read(1):
        raise UserError(f"{label} has {'fewer' if left else 'more'} than {size} bytes: it is not the published file")
    if checksum.hexdigest() != files.sha1[target.name]:
        raise UserError(f"{label} was altered: its SHA-1 is not the published one")
