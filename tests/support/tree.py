"""The layers of the package, and the README's tree of them: `make docs` rewrites it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fedhen"
README = ROOT / "README.md"
LAYERS = [
    *("version", "errors", "seeds", "params", "exact_sums", "interrupts"),
    *(
        "fileio",
        "config",
        "profiles",
        "distributed",
        "hardware",
        "runs",
        "tracking",
        "data",
        "tasks",
        "models",
        "algorithm",
        "wire",
        "privacy",
        "devices",
    ),
    *("engines", "experiment", "deploy", "reports", "benchmark", "fleet", "api", "cli"),
]
"""Packages and top-level modules: each imports only from those before it."""
_TREE = re.compile(r"(?<=```text\nsrc/fedhen/\n).*?(?=```)", re.DOTALL)


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def first_sentence(path: Path) -> str:
    """Returns the first sentence of a module's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"\.(?:\s|$)", " ".join(text.split()))[0]


def make_tree() -> str:
    """Returns a line for each layer: its name and the first sentence of its docstring."""
    lines = []
    for name in LAYERS:
        folder = PACKAGE / name
        path, shown = (
            (folder / "__init__.py", f"{name}/") if folder.is_dir() else (PACKAGE / f"{name}.py", f"{name}.py")
        )
        lines.append(f"  {shown:14} {first_sentence(path)}\n")
    return "".join(lines)


def read_tree() -> str:
    """Returns the tree that the README shows."""
    found = _TREE.search(README.read_text(encoding="utf-8"))
    assert found is not None, "the README has no tree"
    return found[0]


if __name__ == "__main__":
    README.write_text(_TREE.sub(lambda _: make_tree(), README.read_text(encoding="utf-8")), encoding="utf-8")
