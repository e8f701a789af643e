"""The folder of an export has its name when it is complete and at no other time, however the process ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedhen.deploy.manifest import MANIFEST
from fedhen.deploy.out_folder import PYTHON, writing
from fedhen.errors import FedhenError


def export(out: Path, text: str, overwrite: bool = False) -> None:
    with writing(out, overwrite) as folder:
        (folder / "model.onnx").write_text(text)
        (folder / MANIFEST).write_text(text)


def test_an_export_is_there_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with writing(out, False) as folder:
        (folder / MANIFEST).write_text("{}")
        assert not out.exists()
    assert [path.name for path in out.iterdir()] == [MANIFEST]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_after_an_error_nothing_is_left_and_an_earlier_export_is_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), writing(tmp_path / "new" / "out", False) as folder:
        (folder / "model.onnx").write_text("half")
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    export(tmp_path / "out", "old")
    with pytest.raises(RuntimeError), writing(tmp_path / "out", True) as folder:
        (folder / "model.onnx").write_text("half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.onnx").read_text() == "old"


def test_an_export_takes_the_place_of_another_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(out, "old")
    (out / "only-in-the-old.onnx").write_text("old")
    export(out, "new", overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == [MANIFEST, "model.onnx"]
    assert (out / "model.onnx").read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_exports_into_one_folder(tmp_path: Path) -> None:
    """A second process finds the folder locked, changes nothing, and the first one ends as if it was alone."""
    out = tmp_path / "out"
    with writing(out, False) as folder:
        (folder / MANIFEST).write_text("first")
        with pytest.raises(FedhenError, match=r"another process exports to .*out: wait for it to end"):
            export(out, "second")
    assert (out / MANIFEST).read_text() == "first" and [path.name for path in tmp_path.iterdir()] == ["out"]


KILLED = """
import os, signal, sys
from pathlib import Path
from fedhen.deploy.out_folder import writing
with writing(Path(sys.argv[1]), True) as folder:
    (folder / "model.onnx").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_a_killed_export_leaves_nothing_under_the_name_and_is_in_nobodys_way(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for before in ((), ("old",)):
        for text in before:
            export(out, text)
        done = subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
        assert done.returncode == -9
        assert out.exists() == bool(before) and (not before or (out / "model.onnx").read_text() == "old")
    export(out, "new", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (out / "model.onnx").read_text() == "new"


def test_errors_name_the_arguments_of_whoever_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(tmp_path / "out", "old")
    with pytest.raises(FedhenError, match="choose another --out, or --overwrite to replace"):
        export(tmp_path / "out", "new")
    with (
        pytest.raises(FedhenError, match="choose another out, or overwrite=True to replace"),
        writing(tmp_path / "out", False, PYTHON),
    ):
        pass
    monkeypatch.chdir(tmp_path)
    for out in (Path(), Path("/")):
        with pytest.raises(FedhenError, match="is the folder that you are in, or the root: choose another --out"):
            export(out, "new")
