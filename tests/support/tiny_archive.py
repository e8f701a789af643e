"""A tiny data set in the official format, its archive, and a server that answers by a script."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedhen.data.published import Files
from fedhen.errors import FedhenError

FOLDER, ARCHIVE = "tiny-batches-bin", "tiny-binary.tar.gz"
IMAGES = {"data_batch_1.bin": 40, "data_batch_2.bin": 30, "test_batch.bin": 20}


def records(images: int, seed: int) -> bytes:
    """Images in the official format: a label, then 3,072 pixels."""
    rows = np.random.default_rng(seed).integers(0, 256, (images, 3073), dtype=np.uint8)
    rows[:, 0] %= 10
    return rows.tobytes()


CONTENTS = {name: records(images, seed) for seed, (name, images) in enumerate(IMAGES.items())}


def archive(change: Callable[[tarfile.TarFile], None] = lambda tar: None, **contents: bytes) -> bytes:
    """An archive as the official ones are, with other contents for some of the files, and changed at its end."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        add(tar, FOLDER, kind=tarfile.DIRTYPE)
        for name, content in {**CONTENTS, **{f"{key}.bin": value for key, value in contents.items()}}.items():
            add(tar, f"{FOLDER}/{name}", content)
        add(tar, f"{FOLDER}/readme.html", b"<p>read me</p>")
        change(tar)
    # Without the time of day: the tests' names hold the archive's checksum.
    return gzip.compress(plain.getvalue(), mtime=0)


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, len(content)
    tar.addfile(member, io.BytesIO(content))


GOOD = archive()
TINY = Files(
    name="cifar10",
    url=f"http://127.0.0.1:9/{ARCHIVE}",
    checksum=hashlib.md5(GOOD).hexdigest(),
    folder=FOLDER,
    train={name: hashlib.sha1(CONTENTS[name]).hexdigest() for name in ("data_batch_1.bin", "data_batch_2.bin")},
    test={"test_batch.bin": hashlib.sha1(CONTENTS["test_batch.bin"]).hexdigest()},
    sizes={name: 3073 * images for name, images in IMAGES.items()},
    labels=1,
    classes=10,
    mean=(0.0,) * 3,
    std=(1.0,) * 3,
)


class Server(ThreadingHTTPServer):
    """Answers each request as the next word of its script says; the last word stays."""

    def __init__(self, script: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.asked = script, list[str | None]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{ARCHIVE}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        asked = self.headers.get("Range")
        server.asked.append(asked)
        word, _, number = (server.script.pop(0) if len(server.script) > 1 else server.script[0]).partition(":")
        begin = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if word.isdecimal():
            self.send_error(int(word))
        elif word == "garbage":
            self.reply(200, b"<html>please log in</html>")
        elif word == "endless":
            self.endless()
        elif word == "whole":
            self.reply(200, GOOD)
        elif begin >= len(GOOD):
            self.send_error(416)
        else:
            begin = max(0, begin + int(number)) if word == "shifted" and asked else begin
            end = begin + int(number) if word == "piece" else len(GOOD)
            body = GOOD[begin:end]
            about = {"Content-Range": f"bytes {begin}-{end - 1}/{len(GOOD)}"} if word != "nameless" else {}
            sent = body[: int(number)] if word == "break" else body
            self.reply(206 if asked else 200, sent, length=len(body), **about)

    def reply(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(1 << 16))
        except OSError:
            pass


@contextmanager
def serving(*script: str) -> Iterator[Server]:
    server = Server(list(script))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def one_line(error: pytest.ExceptionInfo[FedhenError]) -> str:
    text = str(error.value)
    assert "\n" not in text and "None" not in text
    return text


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


UNPACKED = {f"{FOLDER}/{name}": content for name, content in CONTENTS.items()}
