"""The command line from end to end, as a user meets it: real processes, real folders."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedhen.cli import main
from fedhen.runs.reader import read_run
from support.cli import refused
from support.tiny import TINY_OPTIONS


def fedhen(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedhen", *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=variables, timeout=300, check=False)


@pytest.mark.process
def test_compare_run_report_evaluate(tmp_path: Path) -> None:
    """One comparison; then its pieces again by the other commands, with the same numbers."""
    made = fedhen("compare", "--rounds", "2", *TINY_OPTIONS, "--quiet", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "runs" / "digits-compare"
    assert f"page: {Path('runs') / 'digits-compare' / 'report.html'}" in made.stdout
    assert "Rounds to target" in made.stdout and "fedhen" in made.stdout
    for name in (
        "report.html",
        "tables.md",
        "curves-rounds.png",
        "curves-rounds.svg",
        "curves-bytes.png",
        "curves-bytes.svg",
    ):
        assert (folder / name).stat().st_size > 500
    for method in ("fedhen", "noside", "decouple"):
        run = read_run(folder / method)
        assert run.method == method and len(run.rounds) == 2
        assert run.summary is not None and run.summary.final == run.rounds[-1].accuracy

    again = fedhen(
        "run", "--config", str(folder / "decouple" / "config.toml"), "--quiet", cwd=tmp_path, PYTHONHASHSEED="1"
    )
    assert again.returncode == 0, again.stderr
    repeated = tmp_path / "runs" / "digits-decouple-seed0"
    for name in (
        "rounds.jsonl",
        "config.toml",
        "models/server-complex.safetensors",
        "models/devices-simple.safetensors",
    ):
        assert (repeated / name).read_bytes() == (folder / "decouple" / name).read_bytes(), name

    scored = fedhen("evaluate", "runs/digits-compare/decouple", cwd=tmp_path)
    assert scored.returncode == 0, scored.stdout
    assert scored.stdout.count("%") == 8 and "differs" not in scored.stdout

    report = fedhen("report", "runs/digits-compare", "--out", "mine", "--target", "simple=10,5", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    assert "10.0 %" in report.stdout and (tmp_path / "mine" / "report.html").is_file()
    early = fedhen("report", "runs/digits-compare", "--out", "early", "--rounds", "1", cwd=tmp_path)
    assert "Only the first 1 of 2 rounds are used" in early.stdout and re.search(
        r"^  rounds( +1){3}$", early.stdout, re.MULTILINE
    )


@pytest.mark.process
def test_plain_lines_if_the_output_is_not_a_terminal(tmp_path: Path) -> None:
    made = fedhen("run", "digits", "--rounds", "2", *TINY_OPTIONS, cwd=tmp_path)
    lines = made.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("fedhen  round 1/2  simple ") and "s a round" in lines[0] and "left" in lines[0]
    assert lines[1].startswith("fedhen  round 2/2  simple ")
    assert "run: runs/digits-fedhen-seed0" in made.stdout


def test_every_run_gets_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["run", "digits", "--rounds", "1", *TINY_OPTIONS, "--quiet"]) == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["digits-fedhen-seed0", "digits-fedhen-seed0-2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "digit"], "unknown recipe 'digit': did you mean 'digits'? choose from digits"),
        (["run"], "which recipe? choose from digits"),
        (
            ["run", "digits", "--method", "fedhem"],
            "unknown method 'fedhem': did you mean 'fedhen'? choose from fedhen, noside",
        ),
        (["compare", "--methods", "fedhen,nosid"], "unknown method 'nosid': did you mean 'noside'?"),
        (["compare", "--methods", "fedhen,fedhen"], "name each method once"),
        (["run", "digits", "--rounds", "0"], "rounds = 0 is too small: it must be at least 1"),
        (["run", "digits", "--rounds", "ten"], "argument --rounds: invalid int value: 'ten'"),
        (["run", "digits", "--set", "training.lrr=1"], "unknown setting 'training.lrr': did you mean 'training.lr'?"),
        (["run", "digits", "--set", "devices.active=21"], "devices.active=21 is more than devices.number=20"),
        (["run", "digits", "--set", "devices.number=2000"], "1400 training examples cannot be dealt to 2000 devices"),
        (["run", "digits", "--set", "runtime.threads=1000000000"], "runtime.threads = 1000000000 is too large"),
        (["run", "digits", "--set", "model.blocks=[1, 1, 1000000, 1]"], "model.blocks add up to 1000003: at most 1000"),
        (["run", "digits", "--set", "model.widths=[1, 1, 1, 1000000000]"], "billion weights does not fit"),
        (["run", "digits", "--set", "data.name=digit"], "unknown data set 'digit': did you mean 'digits'?"),
        (["run", "digits", "--set", "model.family=resnet"], "unknown model family 'resnet'"),
        (["run", "digits", "--set", "model.exits=[2, 4]"], "model.exits must be a table, found a list"),
        (["run", "digits", "--set", "tiers.middle=0.5"], "the shares in tiers add up to 1.5"),
        (
            ["run", "digits", "--accelerator", "tpu"],
            "--accelerator 'tpu' is unknown: choose from auto, cpu, cuda; see `fedhen run --help`",
        ),
        (["run", "digits", "--config", "x.toml"], "--config brings its own recipe: leave out 'digits'"),
        (["run", "--config", "x.toml"], "cannot read x.toml: No such file or directory"),
        (["run", "digits", "--seeds", "0,x"], "--seeds '0,x': write whole numbers separated by commas, like 0,1,2"),
        (["run", "digits", "--seeds", "1,1"], "name each seed once"),
        (["run", "digits", "--seeds", "1", "--seed", "1"], "not allowed with argument"),
        (
            ["run", "cifar10-iid", "--data-dir", "nowhere"],
            "data_batch_1.bin is missing: get it with `fedhen data fetch cifar10 --to nowhere`",
        ),
        (["run", "digits", "--data", "nowhere"], "nowhere"),
        (["centralised", "digits", "--tier", "simpel"], "unknown tier 'simpel': did you mean 'simple'?"),
        (["centralised", "digits"], "the following arguments are required: --tier"),
        (
            ["centralised", "digits", "--tier", "simple", "--fraction", "2"],
            "--fraction 2: it must be above 0 and at most 1",
        ),
        (["run", "digits", "--split", "iid"], "unknown option --split; see `fedhen run --help`"),
        (
            ["run", "digits", "--methd=fedhen"],
            "unknown option --methd: did you mean --method?; see `fedhen run --help`",
        ),
        (["run", "digits", "again"], "unexpected argument 'again'; see `fedhen run --help`"),
        (["fleet", "statsu", "x"], "unknown command 'statsu': did you mean 'status'? choose from init, "),
        (["--versoin"], "unknown option --versoin: did you mean --version?; see `fedhen --help`"),
        (["compar"], "unknown command 'compar': did you mean 'compare'? choose from run, "),
        (["report", "nowhere"], "nowhere is not a run folder and contains none"),
        (["report", "a-run", "--rounds", "0"], "rounds is 0: it must be at least 1"),
        (["evaluate", "nowhere"], "nowhere is not a run folder"),
        (["recipes", "digit"], "unknown recipe 'digit': did you mean 'digits'?"),
    ],
)
def test_wrong_input_gets_one_line_exit_code_2_and_leaves_nothing(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("recipe=a\x1b[31mred", r"'a\x1b[31mred' cannot be a name here: use letters"),
        ("model.initial=\x1b]0;x\x07", "?]0;x? does not exist: name a safetensors file"),
        ("training.lr=\u202e1", "training.lr must be a number, found a string"),
        ("\x00=1", "an argument contains a null character"),
        ("training.lr=" + "9" * 100_000, "training.lr must be a number, found a string '999"),
        ("data.name=" + "a" * 100_000, "unknown data set 'aaa"),
        ("a" * 100_000 + "=1", "unknown setting 'aaa"),
        ("tiers=" + "[" * 20_000, "tiers must be a table, found a string"),
        ("task.metrics=" + '["x"]' * 20_000, "task.metrics must be a list"),
    ],
    ids=range(9),
)
def test_control_characters_and_endless_settings_are_one_short_line(
    setting: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, "run", "digits", "--rounds", "1", f"--set={setting}")
    assert message in said and len(said) < 700 and said[:-1].isprintable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_output_folders_are_never_overwritten_unasked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = ["run", "digits", "--rounds", "1", *TINY_OPTIONS, "--quiet", "--run-dir"]
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("two years of work")
    assert "mine is not empty: choose another --run-dir, or --overwrite to replace" in refused(capsys, *run, "mine")
    assert "mine does not hold a run" in refused(capsys, *run, "mine", "--overwrite")
    assert Path("mine/thesis.txt").read_text() == "two years of work"
    Path("file").write_text("")
    assert "cannot write to file" in refused(capsys, *run, "file")
    assert "cannot write to file/below" in refused(capsys, *run, "file/below")
    assert main([*run, "fresh"]) == 0
    capsys.readouterr()
    before = Path("fresh/summary.json").read_bytes()
    assert "fresh is not empty" in refused(capsys, *run, "fresh")
    assert Path("fresh/summary.json").read_bytes() == before
    assert main([*run, "fresh", "--overwrite", "--seed", "1"]) == 0
    assert read_run(Path("fresh")).seed == 1


@pytest.mark.slow
def test_a_refused_comparison_changes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a folder made before the refusal nor a run deleted before it. The options have their old names here."""
    monkeypatch.chdir(tmp_path)
    compare = ["compare", "--rounds", "1", *TINY_OPTIONS, "--quiet", "--methods", "fedhen,noside", "--out", "out"]
    assert main(compare) == 0
    capsys.readouterr()
    Path("out/noside/config.toml").rename("out/noside/thesis.txt")
    before = sorted(p for p in Path("out").rglob("*"))
    assert "out is not empty" in refused(capsys, *compare)
    assert "out/noside does not hold a run" in refused(capsys, *compare, "--force")
    assert sorted(p for p in Path("out").rglob("*")) == before


@pytest.mark.process
def test_two_comparisons_at_once_get_different_folders(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedhen", "compare", "--rounds", "1", *TINY_OPTIONS, "--quiet"]
    processes = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["digits-compare", "digits-compare-2"]


@pytest.mark.slow
def test_several_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run for each seed, the same as that seed alone; tables give n, and curves a band."""
    monkeypatch.chdir(tmp_path)
    small = ["--rounds", "1", *TINY_OPTIONS, "--quiet"]
    assert main(["compare", "--seeds", "3,5", "--methods", "fedhen,noside", *small]) == 0
    assert "fedhen (n = 2)" in capsys.readouterr().out
    folder = tmp_path / "runs" / "digits-compare"
    names = sorted(p.name for p in folder.iterdir() if p.is_dir())
    assert names == ["fedhen-seed3", "fedhen-seed5", "noside-seed3", "noside-seed5"]
    assert main(["run", "digits", "--method", "noside", "--seed", "5", *small]) == 0
    alone = tmp_path / "runs" / "digits-noside-seed5"
    assert (alone / "rounds.jsonl").read_bytes() == (folder / "noside-seed5" / "rounds.jsonl").read_bytes()
    assert main(["run", "digits", "--seeds", "0,1", *small, "--out", "two"]) == 0
    assert sorted(p.name for p in Path("two").iterdir()) == ["seed0", "seed1"]


def test_an_unwritable_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Below /sys not even root may make a folder."""
    run = ["run", "digits", "--rounds", "1", *TINY_OPTIONS, "--quiet", "--out"]
    message = refused(capsys, *run, "/sys/fedhen")
    assert "cannot write to /sys/fedhen: " in message and message.endswith("; choose another --run-dir\n")


def test_a_damaged_run_folder_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["run", "digits", "--rounds", "1", *TINY_OPTIONS, "--quiet", "--out", str(run)]) == 0
    capsys.readouterr()
    model = run / "models" / "server-simple.safetensors"
    model.write_bytes(model.read_bytes()[:100])
    assert "server-simple.safetensors is damaged" in refused(capsys, "evaluate", str(run))
    (run / "rounds.jsonl").write_text("{")
    assert f"{run} is damaged" in refused(capsys, "report", str(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", "[]"),
        ("summary.json", "{}"),
        ("environment.json", "[1]"),
        ("rounds.jsonl", ""),
        ("rounds.jsonl", '{"round": 1, "active": [], "loss": 1, "bytes": {}}'),
        ("config.toml", "recipe = 1"),
    ],
)
def test_damage_of_every_kind_is_one_line(
    name: str, content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "digits", "--rounds", "1", *TINY_OPTIONS, "--quiet", "--out", "run"]) == 0
    capsys.readouterr()
    Path("run", name).write_text(content)
    assert "run is damaged" in refused(capsys, "report", "run")
    assert main(["paper", "--runs", "."]) == 0
    assert "skipped: run is damaged" in capsys.readouterr().err


def test_a_model_that_no_longer_scores_as_recorded_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["run", "digits", "--rounds", "1", *TINY_OPTIONS, "--quiet", "--out", str(run)]) == 0
    summary = json.loads((run / "summary.json").read_text())
    summary["final"]["server"]["simple"] = 0.5
    (run / "summary.json").write_text(json.dumps(summary))
    assert main(["evaluate", str(run)]) == 1
    assert "differs" in capsys.readouterr().out


def test_recipes_are_listed_and_printed_as_a_config_that_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["recipes"]) == 0
    assert capsys.readouterr().out.startswith("digits ")
    assert main(["recipes", "digits"]) == 0
    config = tmp_path / "mine.toml"
    config.write_text(capsys.readouterr().out)
    out = tmp_path / "run"
    assert main(["run", "--config", str(config), "--rounds", "1", *TINY_OPTIONS, "--quiet", "--out", str(out)]) == 0
    assert read_run(out).config["rounds"] == 1


@pytest.mark.process
def test_ctrl_c_prints_how_to_resume_and_exits_with_130(tmp_path: Path) -> None:
    import signal

    process = subprocess.Popen(
        [sys.executable, "-m", "fedhen", "run", "digits", "--rounds", "1000", *TINY_OPTIONS],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "round 1/" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.match(r"fedhen: stopped after round \d+; resume with: fedhen resume runs/", rest.splitlines()[-1])


@pytest.mark.process
def test_a_closed_output_pipe_is_not_an_error(tmp_path: Path) -> None:
    """As with `fedhen recipes digits | head -0`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedhen", "recipes", "digits"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141
