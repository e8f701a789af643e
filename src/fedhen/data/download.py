"""Downloads published archives and files: an interrupted download is continued, and what came is verified."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedhen.data.published import Files, kind_of
from fedhen.data.storage import (
    CHUNK,
    check_disk,
    digest,
    explain_read_errors,
    explain_write_errors,
    make_folder,
    open_file,
    write,
)
from fedhen.errors import DataError

Show = Callable[[int, int | None], None]
"""(bytes so far, all bytes if the server names their number): reports progress."""

TIMEOUT = 30.0
WAITS = (1.0, 2.0, 4.0)
"""Seconds before each further attempt. Every attempt that gets further than the last ones starts the series again."""
TEMPORARY = (408, 425, 429)
"""Status codes after which another attempt may succeed, like every code from 500 on."""
SLACK = 1 << 20
"""Bytes by which an archive may exceed its data files: label names, a read-me, headers."""
HAVE_COPY = "or use a copy that you have with --from PATH"


def show_nothing(done: int, total: int | None) -> None:
    """Ignores the progress."""


def download_file(files: Files, root: Path, *, url: str | None = None, show: Show = show_nothing) -> Path:
    """Downloads the official archive or file into `root` and verifies it; continues an interrupted download."""
    archive, kind = root / files.archive, kind_of(files.checksum)
    with explain_read_errors(archive):
        if archive.is_file() and digest(archive, kind) == files.checksum:
            return archive
    make_folder(root)
    download = _Download(files, url or files.url, root / f"{files.archive}.part", show)
    reached, waits = download.size, list(WAITS)
    while trouble := download.attempt():
        if download.size > reached:
            reached, waits = download.size, list(WAITS)
        if not waits:
            raise DataError(f"cannot download {download.url}: {trouble}; run the command again, {HAVE_COPY}")
        time.sleep(waits.pop(0))
    if (found := digest(download.part, kind)) != files.checksum:
        download.part.unlink()
        raise DataError(
            f"the file from {download.url} has the {kind} {found} instead of {files.checksum} and was removed: "
            f"run the command again, {HAVE_COPY}"
        )
    with explain_write_errors(root):
        download.part.replace(archive)
    return archive


@dataclass(frozen=True)
class _Download:
    files: Files
    url: str
    part: Path
    show: Show

    @property
    def size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def attempt(self) -> str:
        """Tries once to get the rest. Returns what interrupted it, or "" if the download is complete."""
        begin = self.size
        headers = {"User-Agent": "fedhen", **({"Range": f"bytes={begin}-"} if begin else {})}
        try:
            with urlopen(Request(self.url, headers=headers), timeout=TIMEOUT) as response:
                return self._append(response, begin)
        except HTTPError as error:
            answer = " ".join(f"the server answers {error.code} {error.reason}".split())
            if error.code == 416 and begin:
                if digest(self.part, kind_of(self.files.checksum)) == self.files.checksum:
                    return ""  # there was nothing left to send
                self.part.unlink()
            elif error.code not in TEMPORARY and error.code < 500:
                raise DataError(f"cannot download {self.url}: {answer}; try again later, {HAVE_COPY}") from None
            return answer
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            return " ".join(str(getattr(reason, "strerror", None) or reason or type(error).__name__).split())

    def _append(self, response: HTTPResponse, begin: int) -> str:
        done, total = _read_range(response)
        if done > begin:
            self.part.unlink(missing_ok=True)
            return "the server sent a range that was not requested"
        size = sum(self.files.sizes.values())
        check_disk(self.part.parent, size + (total or size) - done)
        with open_file(self.part, done) as file:
            self.show(done, total)
            while done != total and (chunk := response.read1(CHUNK)):
                write(file, chunk, self.part.parent)
                done += len(chunk)
                self.show(done, total)
                if done > size + SLACK:
                    self.part.unlink()
                    raise DataError(f"{self.url} is larger than the data set: use a copy with --from PATH")
        return "" if total in (None, done) else f"the connection broke after {done} of {total} bytes"


def _read_range(response: HTTPResponse) -> tuple[int, int | None]:
    """Returns where in the file the body begins, and the file's size if the server names it."""
    if response.status != 206:  # the whole file may answer a request for its end
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if length.isdecimal() else None
    piece = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    if piece is None:
        return sys.maxsize, None
    return int(piece[1]), int(piece[2]) if piece[2].isdecimal() else None
