"""Options for tiny runs on the command line, and the check of a command that is refused."""

from __future__ import annotations

import pytest

from fedhen.cli import main

TINY = [
    "--set",
    "data.limit=80",
    "--set",
    "training.epochs=1",
    "--set",
    "devices.number=4",
    "--set",
    "devices.active=2",
]
NARROW = ["--set", "model.widths=[4, 4, 8, 8]", "--quiet"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a wrong call prints; it exits with 2."""
    try:
        code: object = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fedhen: ") and captured.err.count("\n") == 1
    return captured.err
