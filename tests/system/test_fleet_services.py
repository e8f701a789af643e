"""What `fedhen fleet init` writes to run a fleet as services is valid, and the node's scripts start what they say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedhen.cli import main
from fedhen.fleet.services import make_units, quote_unit

pytestmark = [pytest.mark.process, pytest.mark.fleet]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "my fleet"
    assert main(["fleet", "init", str(place), "--address", "127.0.0.1:8123"]) == 0
    return place


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_the_units_are_valid(folder: Path, tmp_path: Path) -> None:
    """Verified by systemd itself, which also looks for the program. The template gets a name, as it does in use."""
    for name in ("fedhen-server.service", "fedhen-page.service", "fedhen-node@.service"):
        place = tmp_path / name.replace("@", "@ward-3")
        shutil.copy(folder / "services" / name, place)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", place], capture_output=True, text=True, check=False
        )
        # It also tells of units that the machine of the test lacks.
        wrong = [line for line in done.stderr.splitlines() if "fedhen" in line]
        assert wrong == [], done.stderr


def test_the_units_name_the_folder_and_the_program(folder: Path) -> None:
    unit = (folder / "services" / "fedhen-server.service").read_text()
    assert f'ExecStart={sys.executable} -m fedhen fleet serve "{folder}"\n' in unit
    assert quote_unit("/srv/100%/a $b") == '"/srv/100%%/a $$b"' and quote_unit("/srv/fleet") == "/srv/fleet"
    assert "@" not in "".join(make_units(folder, "fedhen").values()).replace("fedhen-node@NAME", "")


def test_a_start_script_runs_the_node_of_its_name(folder: Path, tmp_path: Path) -> None:
    """With a program in place of Python that prints its arguments."""
    script = folder / "services" / "start" / "simple-1.sh"
    printing = tmp_path / "print"
    printing.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    printing.chmod(0o755)
    script.write_text(script.read_text().replace(sys.executable, str(printing)))
    done = subprocess.run(
        [script, "/other data"], capture_output=True, text=True, check=True, cwd="/", env={**os.environ}
    )
    assert done.stdout.splitlines() == [
        *("-m", "fedhen", "fleet", "node", f"{folder}/nodes/simple-1.toml"),
        *("--data", "/other data", "--state", f"{folder}/nodes/simple-1"),
    ]
    assert {path.name for path in script.parent.iterdir()} == {"simple-1.sh", "complex-1.sh"}


def test_the_compose_file_opens_only_the_gate(folder: Path) -> None:
    lines = (folder / "services" / "compose.yaml").read_text().splitlines()
    assert [line.strip() for line in lines if "ports:" in line] == ['ports: ["8123:8123"]']
    assert f'    volumes: ["{folder}:/fleet"]' in lines
    assert "--no-deps" in (folder / "services" / "Dockerfile").read_text()
