"""Whatever is written in a configuration or on the command line: no traceback, one line, exit code 2, nothing written.

No example trains: the data that they name last does not exist.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import string
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedhen.cli import main
from fedhen.cli.main import parser
from fedhen.config.recipes import RECIPES
from fedhen.config.toml import apply_settings, read_toml, to_toml
from fedhen.config.validation import list_settings as every_setting
from fedhen.errors import FedhenError

pytestmark = pytest.mark.fuzz

NOWHERE = ["--set", "data.name=./nowhere.npz"]
EXAMPLES = settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
KEYS = [key for key, _ in every_setting()]


@pytest.fixture(scope="module", autouse=True)
def elsewhere() -> Iterator[None]:
    """An empty folder to be in, which stays empty, and no data in the usual place."""
    before, data = Path.cwd(), os.environ.get("FEDHEN_DATA")
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        os.environ["FEDHEN_DATA"] = str(Path(place) / "nowhere")
        yield
        os.chdir(before)
        os.environ.pop("FEDHEN_DATA")
        if data is not None:
            os.environ["FEDHEN_DATA"] = data
        assert {p.name for p in Path(place).iterdir()} <= {"mine.toml"}


def called(arguments: Sequence[str]) -> tuple[object, str]:
    """The exit code and what was said on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: object = main(arguments)
        except SystemExit as stop:
            code = stop.code
    return code, err.getvalue()


def refused(arguments: Sequence[str]) -> str:
    code, said = called(arguments)
    assert code == 2, (code, said)
    assert said.startswith("fedhen: ") and said.count("\n") == 1 and said.endswith("\n"), said
    return said


words = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "-1", "0", "1e400", "nan", "auto", "a\nb", "\x1b[2J", "\u2028", "é" * 300, "x" * 5000, "../..", "\udcff"]
    ),
)
scalars = st.one_of(
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30, 10**400]),
    st.floats(),
    words,
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)


def toml_text(value: Any) -> str:
    """A value as TOML, written by hand."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(k)} = {toml_text(v)}' for k, v in value.items())}}}"
    return str(value)


def dotted(key: str) -> str:
    return ".".join(json.dumps(part) for part in key.split("."))


def write(text: str) -> Path:
    path = Path("mine.toml")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


@EXAMPLES
@given(st.dictionaries(st.one_of(st.sampled_from(KEYS), words), values, max_size=4))
def test_any_table_is_a_configuration_or_one_line(table: dict[str, Any]) -> None:
    """What is accepted can be written and read again, and is the same."""
    path = write("".join(f"{dotted(key)} = {toml_text(value)}\n" for key, value in table.items()))
    refused(["run", "--config", str(path), *NOWHERE, "--out", "never"])
    with contextlib.suppress(FedhenError):
        config = read_toml(path)
        assert read_toml(write(to_toml(config))) == config


RECIPE_TEXTS = [to_toml(make(), comments=comments) for make in RECIPES.values() for comments in (False, True)]


@EXAMPLES
@given(st.data())
def test_any_change_of_a_recipe_is_a_configuration_or_one_line(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(RECIPE_TEXTS))
    for _ in range(data.draw(st.integers(1, 3))):
        lines = text.split("\n")
        at = data.draw(st.integers(0, len(lines) - 1))
        kind = data.draw(st.sampled_from(["value", "value", "key", "twice", "gone", "bytes", "cut"]))
        key, _, old = lines[at].partition("=")
        if kind == "value" and old:
            lines[at] = f"{key}= {toml_text(data.draw(values))}"
        elif kind == "key":
            lines[at] = f"{data.draw(words)} ={old}"
        elif kind == "twice":
            lines.insert(data.draw(st.integers(0, len(lines))), lines[at])
        elif kind == "gone":
            del lines[at]
        elif kind == "bytes":
            place = data.draw(st.integers(0, len(lines[at])))
            lines[at] = lines[at][:place] + data.draw(st.text(max_size=3)) + lines[at][place + 1 :]
        else:
            lines = lines[: at + 1]
        text = "\n".join(lines)
    refused(["run", "--config", str(write(text)), *NOWHERE, "--out", "never"])


assignments = st.one_of(
    st.builds(lambda key, value: f"{key}={value}", st.sampled_from(KEYS), words),
    st.builds(lambda key, value: f"{key}={toml_text(value)}", st.sampled_from(KEYS), values),
    st.builds(lambda a, b, value: f"{a}.{b}={value}", st.sampled_from(KEYS), words, words),
    words,
    st.text(alphabet=string.printable),
)


@EXAMPLES
@given(st.sampled_from(sorted(RECIPES)), st.lists(assignments, max_size=4))
def test_any_setting_is_accepted_or_refused_in_one_line(recipe: str, texts: list[str]) -> None:
    given = [part for text in texts for part in ("--set", text)]
    refused(["run", recipe, *(part for part in given), *NOWHERE, "--out", "never"])
    with contextlib.suppress(FedhenError):
        config = apply_settings(RECIPES[recipe](), texts)
        assert read_toml(write(to_toml(config))) == config


COMMANDS: dict[tuple[str, ...], list[str]] = {
    ("run",): [*NOWHERE, "--out", "never"],
    ("compare",): [*NOWHERE, "--out", "never"],
    ("centralised",): [*NOWHERE, "--out", "never"],
    ("bench",): NOWHERE,
    ("paper",): [*NOWHERE, "--runs", "./nowhere", "--out", "never"],
    ("report",): ["./nowhere", "--out", "never"],
    ("evaluate",): [],
    ("recipes",): [],
    ("data", "fetch"): ["--from", "./nowhere", "--to", "never"],
    ("data", "check"): [],
    ("data", "partition"): [*NOWHERE, "--out", "never"],
    (): [],
}
OPTIONS = sorted(
    {option for sub in [parser()] for a in sub._actions if a.choices and a.dest == "command"
     for command in dict(a.choices).values() for b in command._actions for option in b.option_strings}
)  # fmt: skip
tokens = st.one_of(
    words,
    st.sampled_from(
        [*RECIPES, "fedhen", "noside", "fedavg", "simple", "complex", "cifar10", "1,2", "0.5", "cpu", "cuda"]
    ),
    st.sampled_from([*OPTIONS, "--", "--seed=1", "--rounds=3", "--set=rounds=2", "-q", "--se"]),
    assignments,
)


@settings(EXAMPLES, max_examples=600)
@given(st.sampled_from(sorted(COMMANDS)), st.lists(tokens, max_size=6))
def test_any_command_line_is_refused_in_one_line_or_valid(command: tuple[str, ...], more: list[str]) -> None:
    arguments = [*command, *more, *COMMANDS[command]]
    code, _ = called(arguments)
    if code == 0:
        assert (
            {"--help", "-h", "--version", "-V"} & {*more}
            or not arguments
            or command == ("recipes",)
            or any(
                "--help".startswith(token) or "--version".startswith(token) for token in more if token.startswith("--")
            )
        ), arguments
        return
    refused(arguments)
