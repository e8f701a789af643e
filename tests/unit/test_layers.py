"""Each room imports only from rooms above it, in the direction the data flows; and the reports need no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import fedhen

PACKAGE = Path(fedhen.__file__).parent
ROOMS = [
    "version",
    "errors",
    "seeds",
    "params",
    "exact_sums",
    "interrupts",
    "fileio",
    "config",
    "distributed",
    "hardware",
    "runs",
    "tracking",
    "data",
    "models",
    "algorithm",
    "devices",
    "engines",
    "experiment",
    "reports",
    "benchmark",
    "fleet",
    "api",
    "cli",
]


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    """The rooms that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "fedhen":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedhen."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fedhen.")}
    return found


def test_imports_go_one_way() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent == PACKAGE and path.name.startswith("__"):
            continue
        here = room(path)
        assert here in ROOMS, f"{path.name}: give the new room its place in ROOMS"
        above = ROOMS[: ROOMS.index(here) + 1]
        wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in imports(path) if name not in above]
    assert wrong == []


def test_help_recipes_and_reports_start_without_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import fedhen, fedhen.reports, fedhen.cli\n"
        "assert fedhen.cli.main(['recipes']) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_no_method_is_asked_for_its_name() -> None:
    """What a method does follows from its parts: nowhere does the package compare a method's name."""
    names = set(fedhen.METHODS)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                constants = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                assert not constants & names, f"{path.name}, line {node.lineno}"
