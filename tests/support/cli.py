"""The check of a command that is refused."""

from __future__ import annotations

import pytest

from fedhen.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns the one line that a wrong command prints before it exits with 2."""
    try:
        code: object = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fedhen: ") and captured.err.count("\n") == 1
    return captured.err
