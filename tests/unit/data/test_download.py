"""Data that comes over a bad line, from a bad server or in a bad archive ends up whole, or not at all."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import resource
import shutil
import socket
import tarfile
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedhen.cli import data as data_commands
from fedhen.cli.main import Parser
from fedhen.data import archive as archives
from fedhen.data import cifar, download
from fedhen.data.published import CIFAR10, CIFAR100, PUBLISHED, Files, verify
from fedhen.data.storage import data_root
from fedhen.errors import UserError

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


@pytest.fixture(autouse=True)
def direct_and_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "WAITS", (0.0,) * 3)


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text and "None" not in text
    return text


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


UNPACKED = {f"{FOLDER}/{name}": content for name, content in CONTENTS.items()}


# Downloads


def test_a_download_shows_its_progress_and_leaves_only_the_archive(tmp_path: Path) -> None:
    shown: list[tuple[int, int | None]] = []
    with serving("good") as server:
        got = download.download_file(
            TINY, tmp_path / "new" / "root", url=server.url, show=lambda *now: shown.append(now)
        )
        assert files_in(tmp_path) == {f"new/root/{ARCHIVE}": GOOD} and got == tmp_path / "new" / "root" / ARCHIVE
        assert shown[0] == (0, len(GOOD)) and shown[-1] == (len(GOOD), len(GOOD)) and shown == sorted(shown)
        download.download_file(TINY, got.parent, url=server.url)
        assert server.asked == [None], "an archive that is there and right is not asked for again"


def test_an_interrupted_download_continues_where_it_stopped(tmp_path: Path) -> None:
    with serving("break:1000", "break:2000", "good") as server:
        assert download.download_file(TINY, tmp_path, url=server.url).read_bytes() == GOOD
        assert server.asked == [None, "bytes=1000-", "bytes=3000-"]


def test_a_connection_that_breaks_often_but_makes_progress_is_not_given_up(tmp_path: Path) -> None:
    with serving(*["break:10000"] * 20, "good") as server:
        assert download.download_file(TINY, tmp_path, url=server.url).read_bytes() == GOOD
        assert len(server.asked) == 21 > 5 * len(download.WAITS)


def test_a_server_that_gives_pieces_is_asked_for_the_next_ones(tmp_path: Path) -> None:
    (tmp_path / f"{ARCHIVE}.part").write_bytes(GOOD[:10])
    with serving(*["piece:50000"] * 4, "good") as server:
        assert download.download_file(TINY, tmp_path, url=server.url).read_bytes() == GOOD
        assert server.asked == [f"bytes={10 + 50_000 * k}-" for k in range(5)]


def test_the_next_command_continues_a_partial_download(tmp_path: Path) -> None:
    with serving("break:5000", "break:0") as server, pytest.raises(UserError) as error:
        download.download_file(TINY, tmp_path, url=server.url)
    text = one_line(error)
    assert server.url in text and f"broke after 5000 of {len(GOOD)} bytes" in text
    assert "run the command again, or use a copy" in text
    assert server.asked == [None] + ["bytes=5000-"] * len(download.WAITS)
    assert files_in(tmp_path) == {f"{ARCHIVE}.part": GOOD[:5000]}
    with serving("good") as server:
        assert download.download_file(TINY, tmp_path, url=server.url).read_bytes() == GOOD
        assert server.asked == ["bytes=5000-"]


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        (["whole"], ["bytes=500-"]),
        (["shifted:-100"], ["bytes=500-"]),
        (["shifted:100", "good"], ["bytes=500-", None]),
        (["nameless", "good"], ["bytes=500-", None]),
        (["416", "good"], ["bytes=500-", None]),
        (["503", "429", "good"], ["bytes=500-"] * 3),
    ],
    ids=["ignores ranges", "begins earlier", "leaves a gap", "does not say where", "refuses the range", "is busy"],
)
def test_other_answers_to_a_request_for_the_rest(tmp_path: Path, script: list[str], asked: list[str | None]) -> None:
    (tmp_path / f"{ARCHIVE}.part").write_bytes(GOOD[:500])
    with serving(*script) as server:
        assert download.download_file(TINY, tmp_path, url=server.url).read_bytes() == GOOD
        assert server.asked == asked


@pytest.mark.parametrize(("extra", "asked"), [(b"", 1), (b"of something else", 2)])
def test_a_partial_file_of_full_size_is_verified_and_a_longer_one_is_removed(
    tmp_path: Path, extra: bytes, asked: int
) -> None:
    (tmp_path / f"{ARCHIVE}.part").write_bytes(GOOD + extra)
    with serving("good") as server:
        assert download.download_file(TINY, tmp_path, url=server.url).read_bytes() == GOOD
        assert len(server.asked) == asked
    assert files_in(tmp_path) == {ARCHIVE: GOOD}


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("garbage", f"MD5 {hashlib.md5(b'<html>please log in</html>').hexdigest()} instead of {TINY.checksum}"),
        ("404", "the server answers 404 Not Found"),
        ("endless", "is larger than the data set"),
    ],
)
def test_a_server_without_the_archive_gets_one_line_and_leaves_nothing(tmp_path: Path, script: str, says: str) -> None:
    with serving(script) as server, pytest.raises(UserError) as error:
        download.download_file(TINY, tmp_path, url=server.url)
    text = one_line(error)
    assert says in text and server.url in text and "--from PATH" in text
    assert len(server.asked) == 1 and files_in(tmp_path) == {}


def test_no_server_at_all_gets_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/{ARCHIVE}"
        with pytest.raises(UserError) as error:
            download.download_file(TINY, tmp_path, url=url)
    assert f"cannot download {url}: Connection refused; run the command again, or use a copy" in one_line(error)


# Where nothing can be written


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that fills up."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_folder_that_cannot_be_made_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root, says in (("file", "is not a folder"), ("file/data", "cannot write to")):
        with pytest.raises(UserError) as error:
            download.download_file(TINY, tmp_path / root)
        assert says in one_line(error) and "--to" in one_line(error)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_gets_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with serving("good") as server, pytest.raises(UserError) as error:
        download.download_file(TINY, tmp_path, url=server.url)
    assert "Permission denied" in one_line(error)


def test_a_full_disk_is_noticed_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    needed = len(GOOD) + sum(TINY.sizes.values())
    with serving("good") as server:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed - 1))
        with pytest.raises(UserError) as error:
            download.download_file(TINY, tmp_path, url=server.url)
        assert "has 1 MB left, and 1 MB are needed: free some space" in one_line(error)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed))
        download.download_file(TINY, tmp_path, url=server.url)


def test_a_disk_that_fills_up_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(GOOD)
    with files_of_at_most(100_000), pytest.raises(UserError) as error:
        archives.unpack(TINY, tmp_path / ARCHIVE, tmp_path)
    assert f"cannot write to {tmp_path}: File too large; free some space" in one_line(error)
    assert files_in(tmp_path) == {ARCHIVE: GOOD}
    with serving("good") as server, files_of_at_most(100_000), pytest.raises(UserError) as error:
        download.download_file(TINY, tmp_path / "other", url=server.url)
    assert "File too large; free some space" in one_line(error)


# Archives


def unpack(content: bytes, tmp_path: Path) -> dict[str, bytes]:
    """What an archive leaves behind, here and beside."""
    (tmp_path / "in").mkdir(exist_ok=True)
    (tmp_path / "in" / ARCHIVE).write_bytes(content)
    archives.unpack(TINY, tmp_path / "in" / ARCHIVE, tmp_path / "out")
    return files_in(tmp_path / "out")


def test_only_the_data_files_are_unpacked_and_the_reader_takes_them(tmp_path: Path) -> None:
    assert unpack(GOOD, tmp_path) == UNPACKED
    data = cifar.read(TINY, tmp_path / "out")
    rows = np.frombuffer(b"".join(CONTENTS.values()), np.uint8).reshape(-1, 3073)
    assert np.array_equal(np.concatenate([data.y, data.y_test]), rows[:, 0])
    assert np.array_equal(np.concatenate([data.x, data.x_test]).reshape(90, -1), rows[:, 1:])


OTHERS = {
    "one more byte": GOOD + b"0",
    "cut off": GOOD[: len(GOOD) // 2],
    "not zipped": gzip.decompress(GOOD),
    "empty": b"",
    "altered file": archive(test_batch=bytes(61_460)),
    "file outside": archive(lambda tar: add(tar, "../evil", b"evil")),
    "link as data": archive(lambda tar: add(tar, f"{FOLDER}/more", kind=tarfile.SYMTYPE, link="/etc/passwd")),
    "bomb": archive(lambda tar: add(tar, f"{FOLDER}/more", bytes(30_000_000))),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_an_archive_without_the_published_checksum_is_not_opened(tmp_path: Path, kind: str) -> None:
    unpack(GOOD, tmp_path)
    with pytest.raises(UserError) as error:
        unpack(OTHERS[kind], tmp_path)
    found = hashlib.md5(OTHERS[kind]).hexdigest()
    assert f"is not the official {ARCHIVE}: its MD5 is {found}, not {TINY.checksum}" in one_line(error)
    assert files_in(tmp_path / "out") == UNPACKED and sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


# What the user already has


@pytest.mark.parametrize("given", ["archive", "folder", "parent"])
def test_a_local_copy_is_taken_without_the_network(tmp_path: Path, given: str) -> None:
    (tmp_path / "mine.tgz").write_bytes(GOOD)
    unpack(GOOD, tmp_path)
    sources = {"archive": tmp_path / "mine.tgz", "folder": tmp_path / "out" / FOLDER, "parent": tmp_path / "out"}
    assert archives.take(TINY, sources[given], tmp_path / "root") == tmp_path / "root" / FOLDER
    assert files_in(tmp_path / "root") == files_in(tmp_path / "out") == UNPACKED
    assert archives.take(TINY, tmp_path / "root", tmp_path / "root") and files_in(tmp_path / "root") == UNPACKED


def test_a_copy_that_is_not_the_published_one_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "other.tar.gz").write_bytes(OTHERS["file outside"])
    (tmp_path / "empty").mkdir()
    unpack(GOOD, tmp_path)
    folder = tmp_path / "out" / FOLDER
    (folder / "test_batch.bin").write_bytes(bytes(61_460))
    says = {
        tmp_path / "other.tar.gz": "is not the official tiny-binary.tar.gz: its MD5 is ",
        tmp_path / "nowhere": "does not exist",
        tmp_path / "empty": "lacks data_batch_1.bin, data_batch_2.bin, test_batch.bin",
        folder: "test_batch.bin was altered",
    }
    for source, text in says.items():
        with pytest.raises(UserError) as error:
            archives.take(TINY, source, tmp_path / "root")
        assert text in one_line(error) and str(source) in one_line(error)
    assert not (tmp_path / "root").exists() or files_in(tmp_path / "root") == {}


def test_every_file_is_verified(tmp_path: Path) -> None:
    unpack(GOOD, tmp_path)
    root, folder = tmp_path / "out", tmp_path / "out" / FOLDER
    assert verify(TINY, root) == [(name, None) for name in CONTENTS]
    (folder / "data_batch_1.bin").unlink()
    (folder / "data_batch_2.bin").write_bytes(b"short")
    (folder / "test_batch.bin").write_bytes(CONTENTS["test_batch.bin"][:-1] + b"?")
    assert verify(TINY, root) == [
        ("data_batch_1.bin", "is missing"),
        ("data_batch_2.bin", "has 5 bytes instead of 92190"),
        ("test_batch.bin", "was altered: its SHA-1 is not the published one"),
    ]


# The commands


def fedhen(*arguments: object) -> int:
    """The command line with `data` alone."""
    top = Parser(prog="fedhen")
    data_commands.add_commands(top.add_subparsers(dest="command", required=True))
    options = top.parse_args([str(argument) for argument in arguments])
    return int(options.run(options))


def test_the_command_names_the_published_data_sets() -> None:
    assert tuple(PUBLISHED) == data_commands.DATA_SETS


def test_fetch_then_check_then_fetch_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDHEN_DATA", str(tmp_path / "data"))
    with pytest.raises(UserError, match="holds no data set: get one with `fedhen data fetch cifar10`"):
        fedhen("data", "check")
    with serving("break:9000", "good") as server:
        monkeypatch.setitem(PUBLISHED, "cifar10", replace(TINY, url=server.url))
        assert fedhen("data", "fetch", "cifar10") == 0
        shown = capsys.readouterr()
        assert f"cifar10 lies in {tmp_path / 'data' / FOLDER}: 3 files, all verified\n" == shown.out
        assert f"{ARCHIVE}  0.3 of 0.3 MB (100 %)" in shown.err.splitlines()
        assert files_in(tmp_path / "data") == UNPACKED, "the archive is not kept"
        assert fedhen("data", "fetch", "cifar10") == 0 and len(server.asked) == 2
    assert "cifar10 is already in" in capsys.readouterr().out
    for folder in ([], [tmp_path / "data"], [tmp_path / "data" / FOLDER]):
        assert fedhen("data", "check", *folder) == 0
        assert capsys.readouterr().out.splitlines() == [f"cifar10     {name:18}verified" for name in CONTENTS]
    (tmp_path / "data" / FOLDER / "test_batch.bin").unlink()
    remedy = f"files that are missing or wrong: 1; get them with `fedhen data fetch cifar10 --to {tmp_path / 'data'}`"
    with pytest.raises(UserError, match=remedy):
        fedhen("data", "check")
    assert "cifar10     test_batch.bin    is missing" in capsys.readouterr().out


def test_fetch_and_check_a_file_without_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sha256 = hashlib.sha256(GOOD).hexdigest()
    files = replace(PUBLISHED["shakespeare"], checksum=sha256, folder="plain", train={"plain.txt": sha256})
    files = replace(files, sizes={"plain.txt": len(GOOD)})
    root, target = tmp_path / "data", tmp_path / "data" / "plain" / "plain.txt"
    with serving("break:9000", "good") as server:
        url = server.url.replace(ARCHIVE, "plain.txt")
        monkeypatch.setitem(PUBLISHED, "shakespeare", replace(files, url=url))
        assert fedhen("data", "fetch", "shakespeare", "--to", root) == 0
        assert server.asked == [None, "bytes=9000-"]
    assert files_in(root) == {"plain/plain.txt": GOOD}, "the file lies in its folder, and nowhere else"
    assert f"shakespeare lies in {target.parent}: 1 file, verified\n" in capsys.readouterr().out
    assert fedhen("data", "check", root) == 0
    assert capsys.readouterr().out == "shakespeare plain.txt         verified\n"
    target.write_bytes(GOOD[:-1] + b"?")
    with pytest.raises(UserError, match="files that are missing or wrong: 1"):
        fedhen("data", "check", root)
    assert "was altered: its SHA-256 is not the published one" in capsys.readouterr().out
    (tmp_path / "mine.txt").write_bytes(GOOD)
    assert fedhen("data", "fetch", "shakespeare", "--from", tmp_path / "mine.txt", "--to", root) == 0
    assert files_in(root) == {"plain/plain.txt": GOOD}
    (tmp_path / "mine.txt").write_bytes(b"something else")
    target.unlink()
    with pytest.raises(UserError, match=r"mine\.txt is not the official plain\.txt: its SHA-256 is"):
        fedhen("data", "fetch", "shakespeare", "--from", tmp_path / "mine.txt", "--to", root)
    with serving("garbage") as server:
        url = server.url.replace(ARCHIVE, "plain.txt")
        monkeypatch.setitem(PUBLISHED, "shakespeare", replace(files, url=url))
        with pytest.raises(UserError, match=f"has the SHA-256 .* instead of {sha256} and was removed"):
            fedhen("data", "fetch", "shakespeare", "--to", root, "--quiet")
    assert files_in(root) == {}


def test_fetch_from_a_copy_to_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PUBLISHED, "cifar10", TINY)
    (tmp_path / ARCHIVE).write_bytes(GOOD)
    assert fedhen("data", "fetch", "cifar10", "--from", tmp_path / ARCHIVE, "--to", tmp_path / "to", "--quiet") == 0
    assert f"--data-dir {tmp_path / 'to'}" in capsys.readouterr().out
    assert files_in(tmp_path) == {ARCHIVE: GOOD, **{f"to/{name}": content for name, content in UNPACKED.items()}}


@pytest.mark.parametrize("arguments", [["data"], ["data", "fetch"], ["data", "fetch", "mnist"], ["data", "chekc"]])
def test_wrong_arguments_get_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fedhen(*arguments)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.count("\n") == 1 and "--help" in shown


# The real files


@pytest.mark.parametrize("files", [CIFAR10, CIFAR100], ids=lambda files: files.name)
def test_the_published_files_are_the_published_ones(files: Files) -> None:
    if not (data_root() / files.folder).is_dir():
        pytest.skip(f"{files.name} is not in {data_root()}: set FEDHEN_DATA to test with the real files")
    assert verify(files, data_root()) == [(name, None) for name in (*files.train, *files.test)]
