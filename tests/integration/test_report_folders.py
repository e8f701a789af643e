"""Reports on folders of runs, from the command line and from Python."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import fedhen
from fedhen.cli import main
from fedhen.cli.completion import find_nodes
from fedhen.cli.main import parser
from fedhen.errors import FedhenError
from fedhen.runs.folders import find_run_folders
from support.cli import refused
from support.report_fixtures import make_run, write_folder

CURVES = {"simple": [0.5, 0.6, 0.7], "complex": [0.4, 0.5, 0.8]}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/ with two runs in a folder of their own, one beside it, and a folder without any."""
    monkeypatch.chdir(tmp_path)
    for place, method in (("compare/noside", "noside"), ("compare/fedhen", "fedhen"), ("alone", "decouple")):
        write_folder(make_run(method, CURVES), tmp_path / "runs" / place)
    (tmp_path / "runs" / "partition").mkdir()
    return Path("runs")


def test_runs_are_found_below_a_folder_in_order(runs: Path) -> None:
    found = [runs / "alone", runs / "compare/fedhen", runs / "compare/noside"]
    assert list(find_run_folders([runs])) == found
    assert list(find_run_folders([runs / "compare/noside", runs / "alone"])) == [found[2], found[0]]
    # A run folder stands for itself alone.
    write_folder(make_run("mine", CURVES), runs / "alone" / "again")
    assert list(find_run_folders([runs / "alone"])) == found[:1]


def test_a_folder_without_runs_is_refused_in_one_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "runs/partition is not a run folder and contains none: a run folder has a config.toml"
    assert refused(capsys, "report", "runs/partition") == f"fedhen: {message}\n"
    with pytest.raises(FedhenError, match=message):
        fedhen.report("runs/partition")
    with pytest.raises(FedhenError, match="name at least one run folder"):
        fedhen.report()
    assert not (runs / "partition" / "report.html").exists()


@pytest.mark.slow
def test_python_reports_what_the_command_does(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--target=simple=55,60", "--target=complex=auto", "--of=server", "--rounds=2", "--out=theirs"]
    assert main(["report", "runs", *options]) == 0
    shown = capsys.readouterr().out
    text = fedhen.report("runs", out="ours", targets={"simple": [55, 60], "complex": "auto"}, of="server", rounds=2)
    assert shown == f"{text}\npage: theirs/report.html\n"
    for name in ("report.html", "tables.md", "tables.tex", "curves-rounds.svg"):
        assert Path("ours", name).read_bytes() == Path("theirs", name).read_bytes()
    assert "60.0 %" in text and "Only the first 2 of 3 rounds are used: fedhen, alone, noside." in text
    assert fedhen.report("runs", out="ours", targets={"simple": 60}) == fedhen.report(
        "runs/alone", "runs/compare", out="ours", targets={"simple": [60.0]}
    )


def test_python_takes_every_option_of_the_command() -> None:
    (report,) = (node for node in find_nodes(parser()) if node.name == "report")
    options = {option.removeprefix("--") for option in report.options} - {"-h", "help", "target"} | {"targets", "runs"}
    assert {*inspect.signature(fedhen.report).parameters} == options


@pytest.mark.slow
def test_a_report_goes_into_the_only_folder_or_into_a_new_one(runs: Path) -> None:
    fedhen.report(runs)
    assert (runs / "report.html").is_file()
    fedhen.report(runs / "compare", str(runs / "alone"))
    assert (runs / "report" / "report.html").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0: it must be at least 1"),
        ({"of": "servers"}, "unknown owner 'servers': did you mean 'server'"),
        ({"targets": {"simple": "best"}}, "targets is {'simple': 'best'}: give numbers by tier, like"),
        ({"targets": "best"}, "targets is 'best': give numbers by tier, like"),
        ({"targets": {"simpel": 90}}, "unknown tier 'simpel'"),
        ({"measured": "slow:simple=310"}, "measured needs a profile"),
        ({"measured": "slow=310", "profile": "phones"}, "write CLASS:TIER=SECONDS"),
        ({"measured": "slov:simple=310", "profile": "phones"}, "class of profile phones 'slov': did you mean 'slow'"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(runs: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(FedhenError) as refusal:
        fedhen.report(runs, out="report", **options)
    assert message in str(refusal.value)
    assert not Path("report").exists()


@pytest.mark.slow
def test_runs_that_cannot_be_read_are_left_out_with_a_warning(runs: Path) -> None:
    (runs / "alone" / "config.toml").write_text("\x00\n")
    with pytest.warns(UserWarning, match="skipped: runs/alone is damaged"):
        assert "decouple" not in fedhen.report(runs, out="report")
