"""The docs tell the truth: every command, setting, record key and method is in them, and the README's example runs.

`make docs` rewrites the table of settings.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest

import fedhen
from fedhen.cli import main
from fedhen.cli.main import parser
from fedhen.config.settings import Config
from fedhen.config.validation import list_settings, type_hints
from support.families import texts, words
from support.tiny import TINY_OPTIONS

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
CONFIGURATION = ROOT / "docs" / "configuration.md"


def settings_table() -> str:
    """Every key with its default and meaning."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key, item in list_settings():
        default: Any = Config()
        for name in key.split("."):
            default = getattr(default, name)
        default = list(default) if isinstance(default, tuple) else default
        choices = re.findall(r"Literal\[(.*?)\]", str(_hint(key)))
        allowed = f" ({', '.join(c.strip() for c in choices[0].split(','))})" if choices else ""
        rows.append(f"| `{key}` | `{json.dumps(default)}` | {item.metadata['doc'].replace('|', '/')}{allowed} |")
    return "\n".join(rows)


def _hint(key: str) -> Any:
    kind: Any = Config
    for name in key.split("."):
        kind = type_hints(kind)[name]
    return kind


def section(text: str, name: str) -> str:
    return text.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0]


def test_every_setting_is_in_the_table() -> None:
    assert section(CONFIGURATION.read_text(), "settings") == settings_table(), "run `make docs`"


PRINTED: dict[str, list[list[str]]] = {}
"""Command -> the tables that it prints. Pages quote the same command, which reads all records of the paper's runs."""


@pytest.mark.slow
@pytest.mark.xdist_group("results")
@pytest.mark.parametrize(
    ("name", "tables"),
    {"docs/results.md": 2, "docs/results-cifar10.md": 16, "docs/results-cifar100.md": 15, "docs/costs.md": 3}.items(),
)
def test_results_are_those_of_the_runs(
    name: str, tables: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every quoted table is the title and rows of one that the command beside it prints.

    That is `fedhen paper --runs results` where no command is named.
    """

    def tables_of(command: str) -> list[list[str]]:
        if command not in PRINTED:
            words = [sorted(map(str, Path().glob(word))) if "*" in word else [word] for word in command.split()[1:]]
            assert main([*chain.from_iterable(words), "--out", str(tmp_path / str(len(PRINTED)))]) == 0
            lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("───")]
            PRINTED[command] = parts(lines)
        return PRINTED[command]

    def parts(lines: Sequence[str]) -> list[list[str]]:
        """Tables as their lines; columns are as wide as their widest cell, which may be in a row that is not quoted."""
        return [[re.sub("  +", "  ", line.strip()) for line in each] for some, each in groupby(lines, key=bool) if some]

    def quoted(part: Sequence[str], table: Sequence[str]) -> bool:
        left = iter(table)
        return part[0] == table[0] and all(line in left for line in part)

    monkeypatch.chdir(ROOT)
    checked = 0
    for said, block in re.findall(r"((?:[^\n]+\n)+)\n```text\n(.*?)```", Path(name).read_text(), re.DOTALL):
        commands = re.findall(r"`(fedhen (?:paper|report) [^`]*results[^`]*)`", said.replace("\n", " "))
        found = list(chain.from_iterable(map(tables_of, commands or ["fedhen paper --runs results"])))
        for part in parts(block.splitlines()):
            assert any(quoted(part, table) for table in found), "\n".join(part)
            checked += 1
    assert checked >= tables


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    def anchors(of: Path) -> set[str]:
        titles = re.findall(
            r"^#+ (.*)$", re.sub(r"^```.*?^```", "", of.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
        )
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


def test_every_record_key_is_in_the_table_and_no_other(tmp_path: Path) -> None:
    """Of a run that has all of them: one of its devices fails."""
    own: dict[str, Any] = {"devices": {"active": 8}, "training": {"epochs": 1}, "rounds": 1}
    with pytest.warns(UserWarning, match="a device failed"):
        fedhen.train(words(), texts([3]), out=tmp_path / "run", accelerator="cpu", **own)
    written = {
        (name, key)
        for name in ("rounds.jsonl", "timing.jsonl", "errors.jsonl", "summary.json", "environment.json")
        for key in json.loads((tmp_path / "run" / name).read_text())
    }
    table = section(CONFIGURATION.read_text(), "records")
    documented = set(re.findall(r"^\| `([\w.]+)` \| `(\w+)` \|", table, flags=re.MULTILINE))
    assert written == documented


def test_the_tutorial_has_the_commands_that_fleet_init_prints() -> None:
    """test_fleet_processes.py runs them as they are printed."""
    from fedhen.fleet.new_project import make_instructions
    from fedhen.fleet.project import FleetProject

    project = FleetProject(Path("my-fleet"), "127.0.0.1:8001", public="127.0.0.1:8000")
    printed = make_instructions(project, {"simple": 1, "complex": 1})
    told = section((ROOT / "docs" / "fleet.md").read_text(), "instructions")
    assert told.splitlines()[1:-1] == printed.splitlines()[2:]


def commands() -> list[str]:
    (actions,) = (a for a in parser()._actions if a.dest == "command")
    assert actions.choices is not None
    return list(actions.choices)


@pytest.mark.process
@pytest.mark.parametrize("command", commands())
def test_every_command_is_documented_and_has_help(command: str) -> None:
    assert f"fedhen {command}" in README.read_text()
    shown = subprocess.run(
        [sys.executable, "-m", "fedhen", command, "--help"], capture_output=True, text=True, check=True
    )
    assert f"usage: fedhen {command}" in shown.stdout


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.process
def test_the_readmes_example_has_at_most_twenty_lines_and_runs(tmp_path: Path) -> None:
    example = python_blocks()[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accuracies = re.findall(r"(?:simple|complex)\D+([\d.]+)", done.stdout)
    assert accuracies and all(float(x) > 0.8 for x in accuracies[:2]), done.stdout
    assert (tmp_path / "report" / "report.html").is_file()
    again = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    why = "my-run is not empty: choose another run_dir, or overwrite=True to replace the runs in it"
    assert again.stderr.splitlines()[-1] == f"fedhen.errors.ConfigError: {why}"


@pytest.mark.process
def test_all_of_the_readmes_examples_run_one_after_the_other(tmp_path: Path) -> None:
    code = "\n".join(python_blocks())
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("name", ["tasks.md", "models.md", "python.md", "saved-models.md", "tracking.md"])
def test_the_examples_of_a_page_run_one_after_the_other(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), flags=re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_all_examples_of_the_page_on_data_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files are written, its commands run, and then its Python, one after the other."""
    page = (ROOT / "docs" / "data.md").read_text()
    blocks = re.findall(r"```(csv|python|sh)\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (table,) = (text for kind, text in blocks if kind == "csv")
    (file,) = (text for kind, text in blocks if text.startswith("# my.py"))
    Path("people.csv").write_text(table)
    Path("my.py").write_text(file)
    (commands,) = (text for kind, text in blocks if kind == "sh")
    for command in commands.splitlines():
        assert main([*shlex.split(command)[1:], "--accelerator", "cpu"]) == 0, command
    capsys.readouterr()
    code = "\n".join(text for kind, text in blocks if kind == "python" and text != file)
    try:
        exec(compile(code, "data.md", "exec"), {"__name__": "data"})
    finally:
        sys.modules.pop("my", None)
    assert capsys.readouterr().out == "3 devices, 3 classes, 9 rows, 1 for testing\n"


@pytest.mark.slow
def test_the_commands_of_the_page_on_codecs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "wire.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for command in block.splitlines():
        tiny = [*TINY_OPTIONS, "--rounds", "2", "--quiet", "--accelerator", "cpu"] if " run " in command else []
        assert main([*shlex.split(command)[1:], *tiny]) == 0, command


@pytest.mark.slow
def test_the_commands_of_the_page_on_costs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also its profile can be read."""
    page = (ROOT / "docs" / "costs.md").read_text()
    (block,), (profile,) = (re.findall(rf"```{kind}\n(.*?)```", page, flags=re.DOTALL) for kind in ("sh", "toml"))
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(profile)
    for command in block.splitlines():
        tiny = ["--rounds", "2", "--quiet", "--accelerator", "cpu"] if " run " in command else []
        assert main([*shlex.split(command)[1:], *tiny]) == 0, command
    assert main(["report", "runs/uniform", "--profile", "mine.toml"]) == 0


@pytest.mark.slow
def test_the_commands_of_the_page_on_trackers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "tracking.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for command in block.splitlines():
        tiny = [*TINY_OPTIONS, "--accelerator", "cpu"] if " run " in command else []
        assert main([*shlex.split(command)[1:], *tiny]) == 0, command
    assert capsys.readouterr().out.splitlines()[-1] == "my-run: tensorboard has all 3 rounds"


def test_the_recipe_and_the_docs_say_the_same_of_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    for said in (capsys.readouterr().out, README.read_text(), (ROOT / "docs" / "digits.md").read_text()):
        assert said.count("in under a minute on two cores") + said.count("takes under a minute on two cores") == 1


def test_no_placeholder_is_left() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        assert not re.search(r"@[A-Z]+@", page.read_text()), page.name


def test_links_between_the_docs_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_every_place_in_the_code_that_the_docs_name_exists() -> None:
    """`file.py`: `name` in paper-to-code.md."""
    package = ROOT / "src" / "fedhen"
    for line in (ROOT / "docs" / "paper-to-code.md").read_text().splitlines():
        for file in re.findall(r"`([\w/]+\.py)`", line):
            assert (package / file).is_file(), file
    for file, name in re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", (ROOT / "docs" / "paper-to-code.md").read_text()):
        last = name.split(".")[-1]
        source = (package / file).read_text()
        assert re.search(rf"(def|class) {last}\b|^\s*{last}\b.*=", source, flags=re.MULTILINE), f"{file}: {name}"


if __name__ == "__main__":
    head, rest = CONFIGURATION.read_text().split("<!-- settings -->\n")
    _, tail = rest.split("<!-- /settings -->")
    CONFIGURATION.write_text(f"{head}<!-- settings -->\n{settings_table()}\n<!-- /settings -->{tail}")
