"""Data that comes over a bad line, from a bad server or in a bad archive ends up whole, or not at all."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import socket
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fedhen.cli import data as data_commands
from fedhen.cli.main import Parser
from fedhen.data import archive as archives
from fedhen.data import download
from fedhen.data.published import PUBLISHED
from fedhen.errors import FedhenError
from support.tiny_archive import ARCHIVE, CONTENTS, FOLDER, GOOD, TINY, UNPACKED, files_in, one_line, serving


@pytest.fixture(autouse=True)
def direct_and_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "WAITS", (0.0,) * 3)


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
    with serving("break:5000", "break:0") as server, pytest.raises(FedhenError) as error:
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
    with serving(script) as server, pytest.raises(FedhenError) as error:
        download.download_file(TINY, tmp_path, url=server.url)
    text = one_line(error)
    assert says in text and server.url in text and "--from PATH" in text
    assert len(server.asked) == 1 and files_in(tmp_path) == {}


def test_no_server_at_all_gets_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/{ARCHIVE}"
        with pytest.raises(FedhenError) as error:
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
        with pytest.raises(FedhenError) as error:
            download.download_file(TINY, tmp_path / root)
        assert says in one_line(error) and "--to" in one_line(error)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_gets_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with serving("good") as server, pytest.raises(FedhenError) as error:
        download.download_file(TINY, tmp_path, url=server.url)
    assert "Permission denied" in one_line(error)


def test_a_full_disk_is_noticed_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    needed = len(GOOD) + sum(TINY.sizes.values())
    with serving("good") as server:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed - 1))
        with pytest.raises(FedhenError) as error:
            download.download_file(TINY, tmp_path, url=server.url)
        assert "has 1 MB left, and 1 MB are needed: free some space" in one_line(error)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed))
        download.download_file(TINY, tmp_path, url=server.url)


def test_a_disk_that_fills_up_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(GOOD)
    with files_of_at_most(100_000), pytest.raises(FedhenError) as error:
        archives.unpack(TINY, tmp_path / ARCHIVE, tmp_path)
    assert f"cannot write to {tmp_path}: File too large; free some space" in one_line(error)
    assert files_in(tmp_path) == {ARCHIVE: GOOD}
    with serving("good") as server, files_of_at_most(100_000), pytest.raises(FedhenError) as error:
        download.download_file(TINY, tmp_path / "other", url=server.url)
    assert "File too large; free some space" in one_line(error)


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
    with pytest.raises(FedhenError, match="holds no data set: download one with `fedhen data fetch cifar10`"):
        fedhen("data", "check")
    with serving("break:9000", "good") as server:
        monkeypatch.setitem(PUBLISHED, "cifar10", replace(TINY, url=server.url))
        assert fedhen("data", "fetch", "cifar10") == 0
        shown = capsys.readouterr()
        assert f"cifar10 is in {tmp_path / 'data' / FOLDER}: 3 files, all verified\n" == shown.out
        assert f"{ARCHIVE}  0.3 of 0.3 MB (100 %)" in shown.err.splitlines()
        assert files_in(tmp_path / "data") == UNPACKED, "the archive is not kept"
        assert fedhen("data", "fetch", "cifar10") == 0 and len(server.asked) == 2
    assert "cifar10 is already in" in capsys.readouterr().out
    for folder in ([], [tmp_path / "data"], [tmp_path / "data" / FOLDER]):
        assert fedhen("data", "check", *folder) == 0
        assert capsys.readouterr().out.splitlines() == [f"cifar10     {name:18}verified" for name in CONTENTS]
    (tmp_path / "data" / FOLDER / "test_batch.bin").unlink()
    remedy = f"missing or wrong files: 1; download them with `fedhen data fetch cifar10 --to {tmp_path / 'data'}`"
    with pytest.raises(FedhenError, match=remedy):
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
    assert f"shakespeare is in {target.parent}: 1 file, verified\n" in capsys.readouterr().out
    assert fedhen("data", "check", root) == 0
    assert capsys.readouterr().out == "shakespeare plain.txt         verified\n"
    target.write_bytes(GOOD[:-1] + b"?")
    with pytest.raises(FedhenError, match="missing or wrong files: 1"):
        fedhen("data", "check", root)
    assert "was altered: its SHA-256 is not the published one" in capsys.readouterr().out
    (tmp_path / "mine.txt").write_bytes(GOOD)
    assert fedhen("data", "fetch", "shakespeare", "--from", tmp_path / "mine.txt", "--to", root) == 0
    assert files_in(root) == {"plain/plain.txt": GOOD}
    (tmp_path / "mine.txt").write_bytes(b"something else")
    target.unlink()
    with pytest.raises(FedhenError, match=r"mine\.txt is not the official plain\.txt: its SHA-256 is"):
        fedhen("data", "fetch", "shakespeare", "--from", tmp_path / "mine.txt", "--to", root)
    with serving("garbage") as server:
        url = server.url.replace(ARCHIVE, "plain.txt")
        monkeypatch.setitem(PUBLISHED, "shakespeare", replace(files, url=url))
        with pytest.raises(FedhenError, match=f"has the SHA-256 .* instead of {sha256} and was removed"):
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
