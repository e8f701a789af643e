"""Archives and copies that the user has: only the published files are taken, and every one is verified."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fedhen.data import archive as archives
from fedhen.data import cifar
from fedhen.data.published import CIFAR10, CIFAR100, Files, verify
from fedhen.data.storage import data_root
from fedhen.errors import FedhenError
from support.tiny_archive import ARCHIVE, CONTENTS, FOLDER, GOOD, TINY, UNPACKED, add, archive, files_in, one_line

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
    with pytest.raises(FedhenError) as error:
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
        with pytest.raises(FedhenError) as error:
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


# The real files


@pytest.mark.parametrize("files", [CIFAR10, CIFAR100], ids=lambda files: files.name)
def test_the_published_files_are_the_published_ones(files: Files) -> None:
    if not (data_root() / files.folder).is_dir():
        pytest.skip(f"{files.name} is not in {data_root()}: set FEDHEN_DATA to test with the real files")
    assert verify(files, data_root()) == [(name, None) for name in (*files.train, *files.test)]
