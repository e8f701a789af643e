"""A disk that fills up or may not be written to ends a run with one line, and what was written before can be read."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedhen.cli import main
from fedhen.errors import FedhenError
from fedhen.runs.layout import FLEET
from fedhen.runs.reader import read_run
from fedhen.runs.writer import explain_write_errors
from support.tiny import TINY_OPTIONS

pytestmark = pytest.mark.process

RUN = ["run", "digits", "--rounds", "30", *TINY_OPTIONS, "--quiet", "--out"]
PAGE = 4096
Mount = Callable[[Path, str], None]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mounts small file systems of our own, where that is allowed."""
    mounted: list[Path] = []

    def act(place: Path, options: str) -> None:
        place.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no file system can be mounted here")
        mounted.append(place)

    yield act
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def one_line(capsys: pytest.CaptureFixture[str], says: str) -> Iterator[None]:
    capsys.readouterr()
    yield
    err = capsys.readouterr().err
    assert err.startswith("fedhen: ") and err.count("\n") == 1 and says in err, err


def test_a_disk_that_fills_up_in_mid_run(tmp_path: Path, mount: Mount, capsys: pytest.CaptureFixture[str]) -> None:
    """Room for the configuration, the environment and two pages: the records of about ten rounds."""
    disk = tmp_path / "disk"
    mount(disk, f"size={16 * PAGE}")
    (disk / "ballast").write_bytes(bytes(12 * PAGE))
    with one_line(capsys, f"cannot write to {disk / 'run'}: No space left on device: free some space"):
        assert main([*RUN, str(disk / "run")]) == 2
    run = read_run(disk / "run")
    assert 3 <= len(run.rounds) < 30 and run.summary is None
    assert [r.round for r in run.rounds] == list(range(1, len(run.rounds) + 1))
    assert not list(disk.rglob("*.part"))
    assert main(["report", str(disk / "run"), "--out", str(tmp_path / "report")]) == 0
    assert "Unfinished" in capsys.readouterr().out
    with one_line(capsys, "cannot write to"):
        assert main(["report", str(disk / "run")]) == 2


@pytest.mark.filterwarnings("default::UserWarning")  # the command prints it
def test_a_disk_with_room_for_the_records_and_not_for_the_models(
    tmp_path: Path, mount: Mount, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    mount(disk, f"size={12 * PAGE}")
    assert main([*RUN, str(disk / "run")]) == 2
    unsaved, error = capsys.readouterr().err.splitlines()
    assert unsaved == "fedhen: round 30 could not be saved (No space left on device): the run continues"
    assert error.startswith("fedhen: cannot write to ") and "No space left on device" in error
    run = read_run(disk / "run")
    assert len(run.rounds) == 30 and run.summary is None and run.damage == ()
    for model in (disk / "run" / "models").iterdir():
        assert model.suffix == ".safetensors", "whole or not there"


def test_a_read_only_folder(tmp_path: Path, mount: Mount, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    mount(disk, "ro")
    with one_line(capsys, "Read-only file system; choose another --run-dir"):
        assert main([*RUN, str(disk / "run")]) == 2


LIMITED = """
import resource, sys
from fedhen.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
sys.exit(main(sys.argv[1:]))
"""


def test_a_file_size_limit_ends_a_run_with_one_line(tmp_path: Path) -> None:
    """As a quota would: the records end in mid-line, and the last one is known to be torn."""
    command = [sys.executable, "-c", LIMITED, *RUN, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fedhen: cannot write to {tmp_path / 'run'}: File too large: free some space")
    run = read_run(tmp_path / "run")
    assert 3 <= len(run.rounds) < 30
    assert run.damage == ("the last line of rounds.jsonl is torn",)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_to_a_full_disk(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "fedhen", "recipes", "digits"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "fedhen: No space left on device\n")


def test_a_fleets_server_leaves_it_to_others_to_say_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / FLEET).write_text("{}")
    told = "No space left on device: free some space; earlier rounds are kept"
    with pytest.raises(FedhenError, match=re.escape(told)), explain_write_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
