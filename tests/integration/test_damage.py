"""Torn or altered run folders: the undamaged part is read, and what is lost is named in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhen.cli import main
from fedhen.errors import FedhenError
from fedhen.reports import write_report
from fedhen.runs.lines import read_whole_lines
from fedhen.runs.reader import read_run
from support.cli import refused
from support.report_fixtures import make_run, write_folder

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "says"),
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
    ],
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
        except FedhenError as error:
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
