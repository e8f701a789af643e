"""The notebook of first steps, executed from start to end as a notebook would: each last expression is displayed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "first-steps.ipynb"
PLAY = """
import ast, json, sys

names = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    assert not cell.get("outputs"), "it is kept without outputs"
    if cell["cell_type"] == "code":
        body = ast.parse("".join(cell["source"])).body
        shown = body.pop().value if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
        if shown is not None:
            value = eval(compile(ast.Expression(shown), f"cell {number}", "eval"), names)
            for method in ("_repr_html_", "_repr_png_"):
                if hasattr(value, method):
                    getattr(value, method)()
            print(number, repr(value))
"""


@pytest.mark.slow
@pytest.mark.process
def test_the_notebook_runs_from_start_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PLAY, str(NOTEBOOK)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "<Run: " in done.stdout and "fedhen" in done.stdout
