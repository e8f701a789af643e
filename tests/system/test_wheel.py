"""The built wheel works on its own, the embedded data inside."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.tiny import TINY_OPTIONS

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent.parent


def python(*arguments: str, **options: object) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_the_wheel_installs_and_trains(tmp_path: Path) -> None:
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("fedhen-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "fedhen/data/digits/digits.csv.gz" in names and "fedhen/data/digits/ATTRIBUTION.md" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]
    site = tmp_path / "site"
    python("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = python("-c", "import fedhen; print(fedhen.__file__)", cwd=tmp_path, env=environment)
    assert Path(where.strip()).is_relative_to(site)
    out = python("-m", "fedhen", "compare", "--rounds", "1", *TINY_OPTIONS, cwd=tmp_path, env=environment)
    assert "Rounds to target" in out
    assert (tmp_path / "runs" / "digits-compare" / "report.html").is_file()
