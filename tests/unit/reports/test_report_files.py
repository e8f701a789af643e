"""Tables as text, Markdown and LaTeX, and the files of a report."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedhen.errors import FedhenError
from fedhen.reports import compare, write_report
from fedhen.reports.rendering import Group, Table, to_latex, to_markdown, to_text
from fedhen.reports.tables import make_tables
from fedhen.reports.targets import choose_targets
from fedhen.runs.reader import Run, read_run
from support.pages import Checker
from support.report_fixtures import make_run, write_folder

TABLE = Table(
    name="made-up",
    title="A | <b>title</b>",
    columns=("Accuracy", "a_b", "Gain"),
    groups=(Group("x & y", (("80.0 %", "12 ± 3", "> 2.0×"),)),),
    meaning="Fewer is better.",
    notes=("A note.",),
    strong="Gain",
)


def test_table_as_text() -> None:
    assert to_text(TABLE) == (
        "A | <b>title</b>\n"
        "──────────────────────────\n"
        "  Accuracy     a_b    Gain\n"
        "──────────────────────────\n"
        "x & y\n"
        "  80.0 %    12 ± 3  > 2.0×\n"
        "──────────────────────────\n"
        "A note.\n"
    )
    assert "\x1b" not in to_text(replace(TABLE, title="\x1b[31mred"))


def test_table_as_markdown() -> None:
    lines = to_markdown(TABLE).splitlines()
    assert lines[0] == r"## A \| \<b>title\</b>"
    assert lines[4:8] == [
        r"| Accuracy | a\_b | Gain |",
        "| :--- | ---: | ---: |",
        r"| **x \& y** |  |  |",
        "| 80.0 % | 12 ± 3 | **> 2.0×** |",
    ]


def test_table_as_latex() -> None:
    text = to_latex(TABLE)
    assert r"80.0 \% & 12 $\pm$ 3 & \textbf{$>$ 2.0$\times$} \\" in text
    assert r"\multicolumn{3}{l}{\textit{x \& y}} \\" in text
    assert r"Accuracy & a\_b & \textbf{Gain} \\" in text
    assert text.count(r"\begin") == text.count(r"\end") == 2


def three_methods(tiers: Sequence[str] = ("simple", "complex")) -> list[Run]:
    tops = {"noside": 0.8, "fedhen": 0.9, "decouple": 0.7}
    return [
        make_run(method, {tier: [top * n / 20 for n in range(1, 21)] for tier in tiers}) for method, top in tops.items()
    ]


@pytest.mark.slow
def test_the_page_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    report = write_report(three_methods(), tmp_path)
    page = Checker((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [name for name, count in page.ids.items() if count > 1] == []
    assert page.links == []
    assert page.tags["table"] == 4 + page.tags["figure"] == 6
    assert page.tags["polyline"] == 3 * 4  # three methods, of two tiers, over rounds and over bytes
    assert page.tags["link"] == page.tags["img"] == 0 and page.tags["script"] == 1
    assert "made-up: fedhen, noside and decouple" in page.text
    assert "Unfinished" not in page.text
    assert report.paths[0] == tmp_path / "report.html"


@pytest.mark.slow
def test_all_files_are_written_and_sane(tmp_path: Path) -> None:
    report = write_report(three_methods(("tiny", "small", "medium", "large")), tmp_path / "new" / "folder")
    assert sorted(path.name for path in report.paths) == sorted(
        path.name for path in (tmp_path / "new/folder").iterdir()
    )
    assert len(report.paths) == 7
    for path in report.paths:
        if path.suffix == ".png":
            content = path.read_bytes()
            assert content.startswith(b"\x89PNG\r\n\x1a\n")
            width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
            assert 1500 < width < 3000
            assert 300 < height < 1000
            assert len(content) > 20_000
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
    for name in ("tiny", "small", "medium", "large"):
        assert f"{name} model" in report.text


@pytest.mark.slow
def test_the_terminal_text_fits_in_100_columns(tmp_path: Path) -> None:
    runs = [replace(run, config={**run.config, "seed": seed}) for run in three_methods() for seed in range(3)]
    assert max(map(len, write_report(runs, tmp_path).text.splitlines())) <= 100


@pytest.mark.slow
def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write_report(three_methods(), tmp_path / name) for name in ("one", "two"))
    for one, two in zip(first.paths, second.paths, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name


@pytest.mark.slow
def test_names_from_files_cannot_inject_markup(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>$x_{&'
    runs = [
        make_run(evil, {evil: [0.5, 0.6]}, recipe=evil, training={evil: evil}),
        make_run("noside", {evil: [0.4]}, recipe=evil),
    ]
    runs[0].environment["gpu"] = evil
    write_report(runs, tmp_path)
    page = Checker((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.tags["script"] == 1  # the page's own
    assert page.text.count(evil) > 5
    ElementTree.parse(tmp_path / "curves-rounds.svg")


@pytest.mark.slow
def test_unfinished_runs_are_marked_from_folders(tmp_path: Path) -> None:
    runs = [
        make_run("fedhen", {"simple": [0.5, 0.9]}),
        make_run("noside", {"simple": [0.5]}, planned=2),
        make_run("decouple", {"simple": []}, planned=2),
    ]
    folders = [write_folder(run, tmp_path / run.method) for run in runs]
    report = write_report([read_run(folder) for folder in folders], tmp_path / "report")
    page = Checker((tmp_path / "report" / "report.html").read_text(encoding="utf-8"))
    for text in (report.text, page.text, (tmp_path / "report" / "tables.md").read_text(encoding="utf-8")):
        assert "Unfinished: noside, seed 0 (noside), 1 of 2 rounds recorded" in text
        assert "No evaluated round yet: decouple, seed 0 (decouple), 0 of 2 rounds recorded" in text
    assert "not evaluated" in page.text


@pytest.mark.slow
def test_a_report_before_any_evaluation_does_not_fail(tmp_path: Path) -> None:
    report = write_report([make_run("fedhen", {"simple": []}, planned=2)], tmp_path)
    assert "No evaluated round yet" in report.text


@pytest.mark.slow
def test_a_report_on_the_servers_model_says_so(tmp_path: Path) -> None:
    report = write_report(three_methods(), tmp_path, owner="server", targets={"simple": [50], "complex": [60]})
    assert "Rounds to target (server model)" in report.text
    assert "50.0 %" in report.text


def test_one_method_alone_has_no_gain() -> None:
    comparison = compare(three_methods()[:1])
    tables = make_tables(comparison, choose_targets(comparison), "devices")
    assert all("Gain" not in to_markdown(table) for table in tables)


@pytest.mark.slow
def test_an_out_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FedhenError, match="cannot write to"):
        write_report(three_methods(), tmp_path / "file")


@pytest.mark.process
def test_reports_need_no_torch_and_the_tables_no_matplotlib() -> None:
    blocked = "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None; import fedhen.reports"
    subprocess.run([sys.executable, "-c", blocked], check=True)


@pytest.mark.slow
def test_a_method_without_a_tier_is_compared_where_it_can_be(tmp_path: Path) -> None:
    """FedAvg's devices all have the complex model: its simple cells are dashes, not missing evaluations."""
    both = {"simple": [0.5, 0.9], "complex": [0.4, 0.9]}
    fedavg = make_run("fedavg", {"complex": [0.9, 0.95]})
    runs = [make_run("fedhen", both), make_run("noside", both), fedavg]
    report = write_report(runs, tmp_path, targets={"simple": [80.0], "complex": [80.0]})
    rows = [line.split() for line in report.text.splitlines() if "80.0 %" in line][:2]
    assert rows == [["80.0", "%", "2", "2", "–", "1.0×"], ["80.0", "%", "2", "2", "1", "0.5×"]]
    assert "not evaluated" not in (tmp_path / "report.html").read_text() + (tmp_path / "curves-rounds.svg").read_text()
