"""Shakespeare by speaking role: a small text by hand, and the counts of the real one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from fedhen.data.published import SHAKESPEARE
from fedhen.data.shakespeare import PADDING, join_speeches, read_shakespeare, split_by_role
from fedhen.data.storage import data_root
from fedhen.errors import FedhenError

PLAY = "ANN:\nabcdefghij\n\nBob:\nxy\nz: no\n\n\nANN:\nklmnopqrs\n\nGhost:\n\nCY:\nabcdefgh\n"
"""ANN says 10 and 9 characters, 20 with the line break; Bob and CY say 8 each, a ghost says nothing."""


def test_speeches_are_joined_by_role() -> None:
    assert join_speeches(PLAY) == {"ANN": "abcdefghij\nklmnopqrs", "Bob": "xy\nz: no", "CY": "abcdefgh"}


def test_windows_by_hand() -> None:
    """ANN trains on 20 − 2 characters, 17 targets: 4 windows of 5, the last with 2 targets. 2 are held out: 1 target.

    Bob and CY have 8 characters each, of which a tenth is none: 7 targets, 2 windows. Bob comes first by name.
    """
    found = split_by_role(PLAY, devices=3, context=5)
    assert found.roles == ("ANN", "Bob", "CY") and found.vocabulary == "".join(sorted(set(PLAY)))
    assert [shard.tolist() for shard in found.shards] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert [shard.tolist() for shard in found.test_shards] == [[0], [], []]

    def read(codes: torch.Tensor) -> str:
        return "".join("_" if code == PADDING else found.vocabulary[code] for code in codes.tolist())

    assert [read(window) for window in found.x[:3]] == ["abcde", "fghij", "\nklmn"]
    assert [read(window) for window in found.y[:4]] == ["bcdef", "ghij\n", "klmno", "pq___"]
    assert read(found.x[3])[:2] == "op" and found.x.shape == found.y.shape == (8, 5)
    assert read(found.x_test[0])[0] == "r" and read(found.y_test[0]) == "s____"
    assert found.x.dtype == found.y.dtype == torch.int64
    assert split_by_role(PLAY, devices=1, context=5).roles == ("ANN",)


def test_too_many_devices_are_refused() -> None:
    with pytest.raises(FedhenError, match=r"devices\.number=4 is more than the 3 roles that speak: lower it"):
        split_by_role(PLAY, devices=4, context=5)
    with pytest.raises(FedhenError, match=r"the role 'D' has too little text to train on: lower devices\.number=4"):
        split_by_role(f"{PLAY}\nD:\nO\n", devices=4, context=5)


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / SHAKESPEARE.folder / "input.txt"
    with pytest.raises(FedhenError, match=f"is missing: get it with `fedhen data fetch shakespeare --to {tmp_path}`"):
        read_shakespeare(path, devices=3, context=5)
    path.parent.mkdir()
    path.write_bytes(bytes(1_115_394))
    with pytest.raises(FedhenError, match="was altered: its SHA-256 is not the published one"):
        read_shakespeare(path, devices=3, context=5)


def real_file() -> Path:
    path = data_root() / SHAKESPEARE.folder / "input.txt"
    if not path.is_file():
        pytest.skip("FEDHEN_DATA holds no Shakespeare")
    return path


def test_the_real_roles() -> None:
    """Counted line by line: 309 roles are named, 299 speak, 141 of them at least 1,000 characters."""
    path = real_file()
    text = path.read_text()
    sizes: Counter[str] = Counter()
    named, role, before = set(), "", ""
    for line in text.splitlines():
        if not before and line.endswith(":"):
            role = line[:-1]
            named.add(role)
        elif line:
            sizes[role] += len(line) + 1
        before = line
    # A speech's last line break counts once less than a role's speeches do: it stands between them.
    assert {role: size - 1 for role, size in sizes.items()} == {r: len(s) for r, s in join_speeches(text).items()}
    assert (len(named), len(sizes), sum(size > 1000 for size in sizes.values())) == (309, 299, 141)
    found = read_shakespeare(path, devices=100, context=64)
    assert len(found.vocabulary) == 65 and len(found.roles) == len(found.shards) == len(found.test_shards) == 100
    sizes_found = [sizes[role] - 1 for role in found.roles]
    assert sizes_found == sorted((size - 1 for size in sizes.values()), reverse=True)[:100]
    targets = [int((found.y[shard] != PADDING).sum()) for shard in found.shards]
    tests = [int((found.y_test[shard] != PADDING).sum()) for shard in found.test_shards]
    for size, train, test in zip(sizes_found, targets, tests, strict=True):
        assert (train + 1, test + 1) == (size - size // 10, size // 10)


def test_the_address_gives_the_file_itself() -> None:
    assert not SHAKESPEARE.packed and SHAKESPEARE.archive == "input.txt"
    assert SHAKESPEARE.checksums == {"input.txt": SHAKESPEARE.checksum}
