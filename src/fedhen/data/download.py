"""Downloads of published archives: they go on where they broke off, and are verified."""

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

from fedhen.data.archive import SLACK
from fedhen.data.published import Files
from fedhen.data.storage import CHUNK, check_room, digest, make_folder, open_file, reading, write, writing
from fedhen.errors import UserError

Show = Callable[[int, int | None], None]
"""Told how many bytes are there, and of how many if that is known."""

TIMEOUT = 30.0
WAITS = (1.0, 2.0, 4.0)
"""Seconds before each further try; whenever a try gets further than all before it, they begin anew."""
PASSING = (408, 425, 429)
"""Answers of a server that another try may change, as every one from 500 on."""
IN_HAND = "or take a copy that you have with --from PATH"


def silent(done: int, total: int | None) -> None:
    """Shows nothing."""


def download_file(files: Files, root: Path, *, url: str | None = None, show: Show = silent) -> Path:
    """The official archive in `root`, its MD5 checked; goes on where an earlier download broke off."""
    archive = root / files.archive
    with reading(archive):
        if archive.is_file() and digest(archive, "md5") == files.md5:
            return archive
    make_folder(root)
    loading = _Download(files, url or files.url, root / f"{files.archive}.part", show)
    reached, waits = loading.size, list(WAITS)
    while trouble := loading.go_on():
        if loading.size > reached:
            reached, waits = loading.size, list(WAITS)
        if not waits:
            raise UserError(f"cannot download {loading.url}: {trouble}; run the command again to go on, {IN_HAND}")
        time.sleep(waits.pop(0))
    if (found := digest(loading.part, "md5")) != files.md5:
        loading.part.unlink()
        raise UserError(
            f"what {loading.url} gave has the MD5 {found} instead of {files.md5} and was removed: "
            f"run the command again, {IN_HAND}"
        )
    with writing(root):
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
            answer = " ".join(f"the server answers {error.code} {error.reason}".split())
            if error.code == 416 and begin:
                if digest(self.part, "md5") == self.files.md5:
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
        check_room(self.part.parent, size + (total or size) - done)
        with open_file(self.part, done) as file:
            self.show(done, total)
            while done != total and (chunk := response.read1(CHUNK)):
                write(file, chunk, self.part.parent)
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
