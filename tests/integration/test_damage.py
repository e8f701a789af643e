"""Torn, altered or hostile files give one line and execute nothing; of run folders the undamaged part is read."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fedhen
from fedhen.cli import main
from fedhen.errors import UserError
from fedhen.reports import write_report
from fedhen.runs.reader import read_run
from fedhen.runs.writer import read_whole_lines
from support.cli import refused
from support.marks import first_is_quick
from support.report_fixtures import make_run, write_folder
from support.tiny import TINY_OPTIONS

CURVES = {"simple": [0.1, 0.5, 0.6, 0.7], "complex": [0.2, 0.4, 0.6, 0.8]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of four rounds."""
    return write_folder(make_run("fedhen", CURVES), tmp_path / "run")


def lines(folder: Path) -> list[str]:
    return (folder / "rounds.jsonl").read_text().splitlines(keepends=True)


def changed(line: str, **values: Any) -> str:
    return json.dumps({**json.loads(line), **values}) + "\n"


def test_a_torn_last_line_is_dropped_and_reported(run: Path, tmp_path: Path) -> None:
    """A crash may tear it at any byte."""
    (run / "summary.json").unlink()
    *before, last = lines(run)
    for length in range(1, len(last) - 1):
        (run / "rounds.jsonl").write_text("".join(before) + last[:length])
        found = read_run(run)
        assert len(found.rounds) == 3 and found.damage == ("the last line of rounds.jsonl is torn",)
    (run / "rounds.jsonl").write_text("".join(before) + last[:-1])
    assert len(read_run(run).rounds) == 4 and read_run(run).damage == (), "all there but its end"


@pytest.mark.parametrize(
    ("damage", "says"),
    first_is_quick(
        [
            (lambda all: [*all[:2], "garbage\n", all[3]], "rounds.jsonl is damaged from line 3 on"),
            (lambda all: [*all[:2], all[3]], "rounds.jsonl is damaged from line 3 on: round 4 where 3 should be"),
            (lambda all: [*all[:2], all[1], *all[2:]], "from line 3 on: round 2 where 3 should be"),
            (lambda all: [*all[:2], "[" * 100_000 + "\n"], "from line 3 on: it is nested too deeply"),
            (
                lambda all: [*all[:2], changed(all[2], bytes={"down": {"simple": -1}})],
                "from line 3 on: bytes: -1 is out of range",
            ),
            (lambda all: [*all[:2], changed(all[2], bytes={"down": {"simple": 1e300}})], "from line 3 on"),
            (lambda all: [*all[:2], changed(all[2], active=None)], "from line 3 on: active: 'None' is not a list"),
            (lambda all: [*all[:2], changed(all[2], accuracy={"server": {}})], "from line 3 on: no 'devices'"),
            (lambda all: [*all[:2], all[2].replace("0.6", "NaN")], "from line 3 on: NaN is not a number"),
            (lambda all: [*all[:2], all[2].replace("0.6", "1e999")], "from line 3 on: accuracy: inf is not a number"),
            (lambda all: [*all[:2], all[2].replace("0.6", "60")], "from line 3 on: accuracy: 60 is out of range"),
            (lambda all: [*all[:2], all[2].replace("0.6", "9" * 5000)], "from line 3 on"),
            (lambda all: [*all[:2], "\x00" * 100 + "\n"], "from line 3 on"),
            (lambda all: all[:2], "it is finished, but rounds.jsonl ends early"),
        ]
    ),
)
def test_the_rounds_before_the_damage_count_and_the_run_is_marked_everywhere(
    run: Path, tmp_path: Path, damage: Callable[[list[str]], list[str]], says: str
) -> None:
    (run / "rounds.jsonl").write_text("".join(damage(lines(run))))
    found = read_run(run)
    assert [r.round for r in found.rounds] == [1, 2] and says in found.damage[0]
    assert found.truncate(3).damage == found.damage
    assert found.truncate(2).damage == (), "what is lost comes later"
    whole = make_run("noside", CURVES)
    report = write_report([found, whole], tmp_path / "out", targets={"simple": [70]})
    note = "Damaged: fedhen, seed 0 (run): "
    texts = [
        report.text,
        *((tmp_path / "out" / name).read_text() for name in ("report.html", "tables.md", "tables.tex")),
    ]
    for text in texts:
        assert "fedhen (damaged)" in text and note.split(":")[0] in text
        assert "2 of 4" in text
    assert note in report.text and "2 of 4 rounds can be read" in report.text
    (row,) = [line for line in report.text.splitlines() if line.startswith("  70.0 %")][:1]
    assert row.split()[2:4] == ["damaged", "4"], "the lost rounds may have reached it"


def test_a_lost_timing_file_loses_only_the_timing(run: Path) -> None:
    for content in ('{"round": 1}\n', "[]\n", '{"total": "x"}\n', '{"total": -1}\n'):
        (run / "timing.jsonl").write_text(content)
        found = read_run(run)
        assert len(found.rounds) == 4 and found.timing == [] and found.truncate(2).damage == found.damage
        assert found.damage[0].startswith("timing.jsonl is damaged from line 1 on")


@pytest.mark.parametrize("damage", [b"[" * 100_000, b"round 3", b"[]", b"{}", b'{"round": 4}', b"\xff"])
def test_a_run_resumes_after_the_lines_before_the_damage(run: Path, damage: bytes) -> None:
    path = run / "rounds.jsonl"
    first, second, third, _ = whole = path.read_bytes().splitlines(keepends=True)
    assert read_whole_lines(path, 3) == whole[:3]
    path.write_bytes(b"".join([first, second, damage, b"\n", third]))
    assert read_whole_lines(path, 4) == [first, second]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", "a = [" + "[" * 10_000),
        ("config.toml", "x = " + "9" * 5000),
        ("config.toml", "\x00"),
        ("config.toml", "# \n" * (1 << 21)),
        ("config.toml", b"\xff\xfe"),
        ("config.toml", 'recipe = "r"\nmethod = "m"\nseed = 0\nrounds = 4\n[tiers]\n'),
        ("config.toml", 'recipe = "r"\nmethod = "m"\nseed = 0\nrounds = 4\ntiers = 3\n'),
        ("config.toml", 'recipe = "r"\nmethod = "m"\nseed = 0\nrounds = 4\n[tiers]\na = 1\n[targets]\na = [nan]\n'),
        ("config.toml", 'recipe = "r"\nmethod = "m"\nseed = 0\nrounds = 0\n[tiers]\na = 1\n'),
        ("config.toml", 'recipe = "r"\nmethod = "m"\nseed = 0.5\nrounds = 4\n[tiers]\na = 1\n'),
        ("summary.json", "{" * 100_000),
        ("summary.json", '{"a":' * 100_000),
        ("summary.json", '{"parameters": {"simple": "many", "complex": 1}}'),
        ("summary.json", '{"parameters": {"simple": 1, "complex": 1}, "final": {"server": {}}}'),
        ("environment.json", "3"),
        ("rounds.jsonl", "garbage"),
    ],
)
def test_a_folder_without_readable_rounds_is_refused_in_one_line(
    run: Path, name: str, content: str | bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert "is damaged: " in refused(capsys, "report", str(run))
    assert not (run / "report.html").exists()


@pytest.mark.slow
def test_a_report_on_several_runs_leaves_out_unreadable_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for method in ("fedhen", "noside", "decouple"):
        write_folder(make_run(method, CURVES), tmp_path / "all" / method)
    Path("all/noside/config.toml").write_text("\x00\n")
    assert main(["report", "all"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("fedhen: skipped: all/noside is damaged: ") and shown.err.count("\n") == 1
    assert "decouple" in shown.out and "noside" not in shown.out
    for method in ("fedhen", "decouple"):
        Path("all", method, "config.toml").write_text("\x00\n")
    assert "none of 3 runs can be read: all/decouple is damaged: " in refused(capsys, "report", "all")


@pytest.mark.fuzz
@settings(max_examples=300)
@given(st.data())
def test_any_change_of_any_byte_is_one_line_or_a_report(data: st.DataObject) -> None:
    """After a change of a few bytes in any file, what can still be read is reported without an error."""
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(make_run("fedhen", CURVES), Path(place) / "run")
        names = ("config.toml", "rounds.jsonl", "timing.jsonl", "summary.json", "environment.json")
        path = folder / data.draw(st.sampled_from(names))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at : at + data.draw(st.integers(0, 3))] = data.draw(
                st.sampled_from([b"", b"\n", b"9", b"-", b"[", b'"', b"{}", b"null", b"\xff", b"e99"])
            )
        path.write_bytes(content)
        try:
            found = read_run(folder)
        except UserError as error:
            assert "\n" not in str(error)
            return
        from fedhen.reports.comparison import compare, list_warnings
        from fedhen.reports.rendering import to_text
        from fedhen.reports.tables import make_tables
        from fedhen.reports.targets import choose_targets

        comparison = compare([found])
        for table in make_tables(comparison, choose_targets(comparison, owner="server"), "server"):
            assert to_text(table)
        assert isinstance(list_warnings(comparison), list)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["run", "digits", "--rounds", "1", *TINY_OPTIONS, "--quiet", "--out", str(folder)]) == 0
    return folder


def hostile_models() -> dict[str, Callable[[Path], None]]:
    """Name -> what is done to a model file."""

    def raw(content: bytes) -> Callable[[Path], None]:
        def act(path: Path) -> None:
            path.write_bytes(content)

        return act

    def header(value: Any) -> Callable[[Path], None]:
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        return raw(struct.pack("<Q", len(text)) + text)

    def about(**values: Any) -> Callable[[Path], None]:
        def act(path: Path) -> None:
            good = {"exits": ["simple"], "inputs": [1, 8, 8], "classes": 10}
            save_file(load_file(path), path, metadata={"fedhen": json.dumps({**good, **values})})

        return act

    def weights(act: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
        def rewrite(path: Path) -> None:
            tensors = load_file(path)
            act(tensors)
            save_file(
                tensors,
                path,
                metadata={"fedhen": json.dumps({"exits": ["simple"], "inputs": [1, 8, 8], "classes": 10})},
            )

        return rewrite

    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return {
        "empty": raw(b""),
        "a header without end": raw(struct.pack("<Q", 2**63 - 1) + b"{}"),
        "a header of nothing": header(b"{"),
        "a deep header": header(b"[" * 100_000),
        "an offset outside": header({"w": {**one, "data_offsets": [0, 2**40]}}),
        "a giant shape": header({"w": {**one, "shape": [2**40, 2**40]}}),
        "a negative shape": header({"w": {**one, "shape": [-2]}}),
        "no metadata": lambda path: save_file(load_file(path), path),
        "metadata that is no JSON": lambda path: save_file(load_file(path), path, metadata={"fedhen": "{"}),
        "metadata that is deep": lambda path: save_file(load_file(path), path, metadata={"fedhen": "[" * 99_999}),
        "metadata that is a list": lambda path: save_file(load_file(path), path, metadata={"fedhen": "[]"}),
        "more classes than weights": about(classes=10**12),
        "no classes": about(classes=-1),
        "classes in words": about(classes="ten"),
        "inputs without end": about(inputs=[1, 10**9, 10**9]),
        "inputs of words": about(inputs="abc"),
        "exits of numbers": about(exits=[1]),
        "a wrong shape": weights(lambda t: t.update({k: torch.zeros(3, 3) for k in list(t)[:1]})),
        "a weight too many": weights(lambda t: t.update(evil=torch.zeros(1))),
        "a weight too few": weights(lambda t: t.pop(next(iter(t)))),
    }


@pytest.mark.parametrize("name", hostile_models())
def test_a_hostile_model_file_is_one_line(trained: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained / "models" / "server-simple.safetensors"
    good = path.read_bytes()
    try:
        hostile_models()[name](path)
        with pytest.raises(UserError) as error:
            fedhen.load(trained, "simple")
        assert "\n" not in str(error.value)
        if not name.startswith(("exits", "inputs", "more")):
            refused(capsys, "evaluate", str(trained))
    finally:
        path.write_bytes(good)
    fedhen.load(trained, "simple")


@pytest.mark.slow
def test_nothing_that_a_run_folder_names_is_executed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only training reads a method file, and names of tiers cannot lead out of the folder."""
    config, evil = trained / "config.toml", tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    good = config.read_text()
    try:
        config.write_text(good.replace('method_file = ""', f'method_file = "{evil}:M"'))
        assert main(["report", str(trained), "--out", str(tmp_path / "report")]) == 0
        assert main(["evaluate", str(trained)]) == 0
        assert main(["paper", "--runs", str(trained), "--out", str(tmp_path / "paper")]) == 0
        assert not (tmp_path / "owned").exists()
        capsys.readouterr()
        config.write_text(good.replace("simple = ", '"../../simple" = '))
        with pytest.raises(UserError, match="cannot be a name here"):
            fedhen.load(trained, "../../simple")
    finally:
        config.write_text(good)


@pytest.mark.parametrize("size", [10**9, 10**7])
def test_a_model_that_is_too_large_to_be_built_is_one_line(
    trained: Path, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = trained / "config.toml"
    good = config.read_text()
    try:
        config.write_text(good.replace("widths = [4, 4, 8, 8]", f"widths = [{size}, {size}, 8, 8]"))
        refused(capsys, "evaluate", str(trained))
    finally:
        config.write_text(good)


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def giant_header(shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return (open, (str(self.place), "w"))


def archive(path: Path, **members: bytes) -> Path:
    labels = npy(np.arange(4) % 2)
    images = npy(np.zeros((4, 8, 8), np.uint8))
    whole = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels, **members}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in whole.items():
            file.writestr(f"{name}.npy", content)
    return path


def test_pickles_in_an_archive_are_never_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = np.array([Evil(tmp_path / "owned")] * 4, dtype=object)
    for name in ("x_train", "y_test"):
        data = archive(tmp_path / "data.npz", **{name: npy(evil)})
        assert "Python objects (pickles), which are not read" in refused(capsys, "run", "digits", "--data", str(data))
    raw = archive(tmp_path / "raw.npz", x_train=b"\x80\x04cbuiltins\nopen\n(S'owned'\nS'w'\ntR.")
    refused(capsys, "run", "digits", "--data", str(raw))
    assert not (tmp_path / "owned").exists() and not Path("owned").exists()


@pytest.mark.parametrize("shape", [(2**40, 8, 8), (4, 2**31, 2**31), (2**62, 2**62)])
def test_giant_dimensions_are_refused(
    tmp_path: Path, shape: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    data = archive(tmp_path / "data.npz", x_train=giant_header(shape) + bytes(100))
    refused(capsys, "run", "digits", "--data", str(data))


@pytest.mark.parametrize(("claimed", "says"), [(2**50, "unpacks to 1125899.9 GB, and "), (200, "is damaged")])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, claimed: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what it says that it unpacks to; one that claims less than it holds is not unpacked further than that."""
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, array in (("x", np.zeros((4, 1000, 1000), np.uint8)), ("y", np.arange(4) % 2)):
            for part in ("train", "test"):
                file.writestr(f"{name}_{part}.npy", npy(array))
        file.infolist()[0].file_size = claimed
    assert path.stat().st_size < 50_000
    assert says in refused(capsys, "run", "digits", "--data", str(path))


def test_an_archive_with_two_arrays_of_one_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = archive(tmp_path / "data.npz")
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr("x_train.npy", npy(np.zeros((4, 8, 8), np.uint8)))
    assert "has 2 arrays named x_train" in refused(capsys, "run", "digits", "--data", str(path))


@pytest.mark.fuzz
@settings(max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 2000), st.integers(0, 40))
@example(b"", 0, 0)
def test_any_change_of_an_archive_is_one_line_or_data(content: bytes, at: int, cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        path = archive(Path(place) / "data.npz")
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + content + whole[at + cut :])
        from fedhen.data.sources import read_own_data

        try:
            data = read_own_data(path)
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert data.x.shape[1:] == (1, 8, 8)
