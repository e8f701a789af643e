"""Packages import in one direction, tests import no other tests, and the README shows the packages as they are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fedhen
from fedhen.algorithm.personal import PERSONAL
from support.tree import LAYERS, PACKAGE, layer_of, make_tree, read_tree

TESTS = Path(__file__).parents[1]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(path: Path) -> Iterator[str]:
    """Yields the full name of everything that a file imports."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_each_layer_imports_only_from_those_above_it() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent == PACKAGE and path.name.startswith("__"):
            continue
        here = layer_of(path)
        assert here in LAYERS, f"{path.name}: add the new layer to LAYERS in tests/support/tree.py"
        allowed = LAYERS[: LAYERS.index(here) + 1]
        layers = {name.split(".")[1] for name in imported_modules(path) if name.startswith("fedhen.")}
        wrong += [f"{path.relative_to(PACKAGE)} imports {layer}" for layer in layers.difference(allowed)]
    assert wrong == []


def test_no_test_module_imports_another() -> None:
    wrong = []
    for path in sorted(TESTS.rglob("*.py")):
        parts = {part for name in imported_modules(path) for part in name.split(".")}
        wrong += [f"{path.name} imports {part}" for part in parts if part.startswith("test_") or part == "conftest"]
    assert wrong == [], "what tests share belongs in tests/support"


def test_the_tree_of_the_readme_is_that_of_the_package() -> None:
    assert read_tree() == make_tree(), "run `make docs`"


def test_help_recipes_and_reports_start_without_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import fedhen, fedhen.reports, fedhen.cli\n"
        "assert fedhen.cli.main(['recipes']) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_no_code_depends_on_the_name_of_a_method() -> None:
    """What a method does follows from its parts: nowhere does the package compare its name. So of personal models."""
    names = {*fedhen.METHODS, *PERSONAL} - {"none"}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Compare):
                constants = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                assert not constants & names, f"{path.name}, line {node.lineno}"
