"""Where downloaded data lies, and how it gets there: whole, verified, and nothing besides."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedhen.errors import UserError

if TYPE_CHECKING:
    from fedhen.data.cifar import Files

Show = Callable[[int, int | None], None]
"""Told how many bytes are there, and of how many if that is known."""

CHUNK = 1 << 20
SLACK = 1 << 20
"""An archive is at most so much larger than its data files: label names, a read-me, tar's own blocks."""
TIMEOUT = 30.0
WAITS = (1.0, 2.0, 4.0)
"""Seconds before each further try; whenever a try gets further than all before it, they begin anew."""
PASSING = (408, 425, 429)
"""Answers of a server that another try may change, as every one from 500 on."""
IN_HAND = "or take a copy that you have with --from PATH"
ELSEWHERE = "choose another folder with --to or FEDHEN_DATA"


def data_root(override: Path | None = None) -> Path:
    """The folder for downloaded data: as given, or $FEDHEN_DATA, or the platform's place for caches."""
    if override is not None:
        return override
    if "FEDHEN_DATA" in os.environ:
        return Path(os.environ["FEDHEN_DATA"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fedhen"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "fedhen" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedhen"


def silent(done: int, total: int | None) -> None:
    """Shows nothing."""


def download(files: Files, root: Path, *, url: str | None = None, show: Show = silent) -> Path:
    """The official archive in `root`, its MD5 checked; goes on where an earlier download broke off."""
    archive = root / files.archive
    with _reading(archive):
        if archive.is_file() and _digest(archive, "md5") == files.md5:
            return archive
    _make(root)
    loading = _Download(files, url or files.url, root / f"{files.archive}.part", show)
    reached, waits = loading.size, list(WAITS)
    while trouble := loading.go_on():
        if loading.size > reached:
            reached, waits = loading.size, list(WAITS)
        if not waits:
            raise UserError(f"cannot download {loading.url}: {trouble}; run the command again to go on, {IN_HAND}")
        time.sleep(waits.pop(0))
    if (found := _digest(loading.part, "md5")) != files.md5:
        loading.part.unlink()
        raise UserError(
            f"what {loading.url} gave has the MD5 {found} instead of {files.md5} and was removed: "
            f"run the command again, {IN_HAND}"
        )
    with _writing(root):
        loading.part.replace(archive)
    return archive


@dataclass(frozen=True)
class _Download:
    files: Files
    url: str
    part: Path
    show: Show

    @property
    def size(self) -> int:
        """Bytes that are there."""
        return self.part.stat().st_size if self.part.exists() else 0

    def go_on(self) -> str:
        """One try to get the rest: what broke it off, or nothing if it came to its end."""
        begin = self.size
        headers = {"User-Agent": "fedhen", **({"Range": f"bytes={begin}-"} if begin else {})}
        try:
            with urlopen(Request(self.url, headers=headers), timeout=TIMEOUT) as response:
                return self._append(response, begin)
        except HTTPError as error:
            answer = f"the server answers {error.code} {error.reason}"
            if error.code == 416 and begin:
                if _digest(self.part, "md5") == self.files.md5:
                    return ""  # there was nothing left to send
                self.part.unlink()
            elif error.code not in PASSING and error.code < 500:
                raise UserError(f"cannot download {self.url}: {answer}; try again later, {IN_HAND}") from None
            return answer
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            return " ".join(str(getattr(reason, "strerror", None) or reason or type(error).__name__).split())

    def _append(self, response: HTTPResponse, begin: int) -> str:
        """Write an answer's body where it belongs."""
        done, total = _place(response)
        if done > begin:
            self.part.unlink(missing_ok=True)
            return "the server sent another piece than the one asked for"
        size = sum(self.files.sizes.values())
        _check_room(self.part.parent, size + (total or size) - done)
        with _opened(self.part, done) as file:
            self.show(done, total)
            while done != total and (chunk := response.read1(CHUNK)):
                _write(file, chunk, self.part.parent)
                done += len(chunk)
                self.show(done, total)
                if done > size + SLACK:
                    self.part.unlink()
                    raise UserError(f"{self.url} is larger than the data it should hold: take a copy with --from PATH")
        return "" if total in (None, done) else f"the connection broke off after {done} of {total} bytes"


def _place(response: HTTPResponse) -> tuple[int, int | None]:
    """Where in the file an answer's body begins, and how large the file is if the server says."""
    if response.status != 206:  # the whole file may answer a request for its end
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if length.isdecimal() else None
    piece = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    if piece is None:
        return sys.maxsize, None
    return int(piece[1]), int(piece[2]) if piece[2].isdecimal() else None


def unpack(files: Files, archive: Path, root: Path) -> Path:
    """Write an archive's data files below `root`, once every member has proved harmless and every file right."""
    with _stage(files, root, archive) as stage, _reading(archive):
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
    with _reading(source):
        if source.is_file():
            if (found := _digest(source, "md5")) != files.md5:
                raise UserError(f"{source} is not the official {files.archive}: its MD5 is {found}, not {files.md5}")
            return unpack(files, source, root)
        if not source.is_dir():
            raise UserError(f"{source} does not exist: name {files.archive}, or the folder {files.folder}")
        folder = source / files.folder if (source / files.folder).is_dir() else source
        present = [folder / name for name in files.sha1 if (folder / name).is_file()]
    with _stage(files, root, folder) as stage:
        for path in present:
            with _reading(path), path.open("rb") as file:
                _copy(files, file, stage / path.name, str(path))
    return root / files.folder


def verify(files: Files, root: Path) -> list[tuple[str, str | None]]:
    """Every data file with what is wrong with it, if anything."""
    return [(name, _problem(files, root / files.folder / name)) for name in files.sha1]


def _problem(files: Files, path: Path) -> str | None:
    try:
        if (size := path.stat().st_size) != files.sizes[path.name]:
            return f"has {size} bytes instead of {files.sizes[path.name]}"
        return None if _digest(path, "sha1") == files.sha1[path.name] else "was altered: its SHA-1 is another"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


@contextmanager
def _stage(files: Files, root: Path, source: Path) -> Iterator[Path]:
    """A passing folder whose files, once they are all there, are renamed to where they belong."""
    _make(root)
    with _writing(root), TemporaryDirectory(dir=root, prefix=".fedhen-") as passing:
        yield Path(passing)
        if missing := [name for name in files.sha1 if not (Path(passing) / name).exists()]:
            raise UserError(f"{source} lacks {', '.join(missing)}: it is not the whole {files.name} in binary form")
        (root / files.folder).mkdir(exist_ok=True)
        for name in files.sha1:
            (Path(passing) / name).replace(root / files.folder / name)


def _copy(files: Files, source: IO[bytes], target: Path, label: str) -> None:
    """Copy a data file if it is the published one, and never more bytes than that has."""
    digest, size = hashlib.sha1(usedforsecurity=False), files.sizes[target.name]
    left = size
    with _opened(target) as file:
        while left and (chunk := source.read(min(left, CHUNK))):
            digest.update(chunk)
            left -= len(chunk)
            _write(file, chunk, target.parent.parent)
    if left or source.read(1):
        raise UserError(f"{label} has {'fewer' if left else 'more'} than {size} bytes: it is not the published file")
    if digest.hexdigest() != files.sha1[target.name]:
        raise UserError(f"{label} was altered: its SHA-1 is not the published one")


def _make(folder: Path) -> None:
    with _writing(folder):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is not a folder: {ELSEWHERE}")
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; make room, or {ELSEWHERE}") from None


def _opened(path: Path, keep: int = 0) -> IO[bytes]:
    """A file to write to, after so many of the bytes that it has."""
    with _writing(path.parent):
        file = path.open("r+b" if keep else "wb")
        file.truncate(keep)
        file.seek(keep)
    return file


def _write(file: IO[bytes], content: bytes, folder: Path) -> None:
    with _writing(folder):
        file.write(content)
        file.flush()


def _check_room(folder: Path, needed: int) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        room = f"{free / 1e6:.0f} MB left and {needed / 1e6:.0f} MB are needed"
        raise UserError(f"{folder} has {room}: make room, or {ELSEWHERE}")


def _digest(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
