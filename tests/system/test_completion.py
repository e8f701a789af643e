"""The scripts of `fedhen completion` in real shells, and the list of the commands."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from fedhen.algorithm.methods import METHODS
from fedhen.cli import completion, main, training
from fedhen.cli.main import PURPOSES, parser
from fedhen.config.recipes import RECIPES
from fedhen.tasks.registry import TASKS
from fedhen.version import VERSION

SECONDS = 60
LINES = {
    "comple": "completion",
    "--vers": "--version",
    "data part": "partition",
    "data fetch cifar100": "cifar100",
    "data fetch cifar100 --t": "--to",
    "run shakespeare-": "shakespeare-4",
    "run digits --accel": "--accelerator",
    "run digits --accelerator cu": "cuda",
    "run digits --method nosi": "noside",
    "compare --methods side": "side-apart",
    "run digits --local feddy": "feddyn",
    "run digits --task multi": "multi-label",
    "run digits --set training.mom": "training.momentum=",
    "run --config sett": "settings-of-mine.toml",
    "run digits --method mym": "mymethod.py",
    "resume my-r": "my-run",
    "fleet run --resume my-r": "my-run",
    "completion fi": "fish",
}
"""Lines that can be continued in one way only, and what their last word becomes."""
START = {"bash": ["bash", "--norc", "-i"], "zsh": ["zsh", "-f", "-i"]}
LOAD = {"bash": "source {}", "zsh": "autoload -U compinit; compinit -u; source {}"}


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script of a shell, beside some files."""
    shell: str = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    (tmp_path / "my-run").mkdir()
    for name in ("settings-of-mine.toml", "mymethod.py"):
        (tmp_path / name).touch()
    path = tmp_path / f"script.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def type_into(shell: str, text: str, folder: Path) -> str:
    """Types text into a shell in a terminal, until it exits. Returns what the terminal shows."""
    master, slave = pty.openpty()
    variables = {**os.environ, "HOME": str(folder), "TERM": "dumb", "INPUTRC": os.devnull}
    with subprocess.Popen(
        START[shell], stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=variables, start_new_session=True
    ) as process:
        os.close(slave)
        os.write(master, text.encode())
        shown, end = b"", time.monotonic() + SECONDS
        while time.monotonic() < end:
            if not select.select([master], [], [], 0.1)[0]:
                continue
            try:
                shown += os.read(master, 1 << 16)
            except OSError:  # the shell has exited
                break
        else:
            process.kill()
    os.close(master)
    return shown.decode(errors="replace")


@pytest.mark.process
@pytest.mark.parametrize("script", ["bash", "zsh"], indirect=True)
def test_tab_completes_commands_options_names_and_files(script: Path, tmp_path: Path) -> None:
    """In a shell in which `fedhen` writes its last argument to a file."""
    shell, said = script.suffix[1:], tmp_path / "said"
    setup = [LOAD[shell].format(script), f'fedhen() {{ printf "%s\\n" "${{@: -1}}" >> {said}; }}']
    typed = [*setup, *(f"fedhen {line}\t" for line in LINES), "exit"]
    shown = type_into(shell, "".join(f"{line}\n" for line in typed), tmp_path)
    assert said.is_file(), shown
    assert [word.rstrip("/") for word in said.read_text().splitlines()] == list(LINES.values()), shown


@pytest.mark.process
@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_completes_commands_options_names_and_files(script: Path, tmp_path: Path) -> None:
    asked = "; echo; ".join(f"complete -C 'fedhen {line}'" for line in LINES)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {script}; {asked}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    # Each candidate is followed by a tab and its description. Files are described with their size.
    found = [{line.split("\t")[0].rstrip("/") for line in each.splitlines()} for each in done.stdout.split("\n\n")]
    assert found == [{word} for word in LINES.values()], done.stdout


@pytest.mark.process
@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_lists_the_commands_and_the_options_of_one(script: Path, tmp_path: Path) -> None:
    ask = 'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _fedhen; echo "${COMPREPLY[@]}"'
    asked = "; ".join(f"COMP_WORDS=(fedhen {words}); {ask}" for words in ('""', "recipes -", 'run --rounds ""'))
    code = f"source {script}; complete -p fedhen; {asked}"
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stdout.splitlines() == [
        "complete -o default -F _fedhen fedhen",
        " ".join(command_names()),
        "-h --help",
        "",
    ]


def command_names() -> list[str]:
    (node, *_) = completion.find_nodes(parser())
    return list(node.commands)


def test_completed_names_are_those_that_exist() -> None:
    assert list(METHODS) == list(training.METHODS)
    assert completion.WORDS["TASK"] == tuple(TASKS) and completion.WORDS["RECIPE"] == tuple(RECIPES)


def test_every_value_of_an_option_is_completed_or_known_to_be_free() -> None:
    """A new label in the help is added to the completed ones, or here."""
    free = {
        "TRACKER",
        "INPUT",
        "POINTS",
        "N",
        "S",
        "S,S",
        "X",
        "TIER",
        "TIER=N",
        "TIER=X,...",
        "TIER=X,Y",
        "R,R",
        "HOST:PORT",
        "CLASS:TIER=SECONDS",
        "NAME",
        "TIME",
        *("E", "Z", "D"),
    }
    labels = {
        place.label
        for node in completion.find_nodes(parser())
        for place in node.places
        if place.values is not None and not place.values.words and not place.values.files
    }
    assert labels == free


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_commands_are_listed_by_purpose(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 0
    shown, *_ = capsys.readouterr().out.partition("\noptions:")
    listed: dict[str, list[str]] = {}
    for block in shown.split("\n\n")[2:]:
        purpose, *lines = block.splitlines()
        listed[purpose.rstrip(":")] = [line.split()[0] for line in lines]
    assert listed["train"][:2] == ["run", "compare"] and list(listed) == list(PURPOSES)
    assert sorted(name for names in listed.values() for name in names) == sorted(command_names())


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_version(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([option])
    assert stop.value.code == 0 and capsys.readouterr().out == f"fedhen {VERSION}\n"
