"""What `fedhen fleet init` writes to run a fleet as services is valid, and the node's scripts start what they say."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.node_pb2 import Node

from fedhen.cli import main
from fedhen.fleet.gate_rules import SMALL_ROUTES
from fedhen.fleet.processes import free_port
from fedhen.fleet.services import make_units, quote_unit
from support.doors import node_client, serve
from support.kills import wait_for

NGINX = shutil.which("nginx")
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


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="there is no nginx")
def test_nginx_before_the_gate_passes_only_what_nodes_need(tmp_path: Path) -> None:
    """Set up as the comment in the file says. Paths, methods and sizes are refused by nginx, keys by the gate."""
    assert NGINX is not None
    place, public, inner = tmp_path / "my fleet", free_port(), free_port()
    assert main(["fleet", "init", str(place), "--address", f"127.0.0.1:{public}"]) == 0
    settings = (place / "services" / "nginx.conf").read_text().replace(":8001", f":{inner}")
    said = re.findall(r"^#    ( .*)$", settings, flags=re.MULTILINE)
    listen, limits = said[0].strip(), "\n".join(line.strip() for line in said[1:])
    serve_file = place / "serve.toml"
    text = re.sub("^listen = .*$", listen, serve_file.read_text(), flags=re.MULTILINE)
    serve_file.write_text(f"{text}\n{limits}\n")
    whole = tmp_path / "nginx.conf"
    whole.write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\n{settings}}}\n")
    with serve(place, f"127.0.0.1:{public}") as door:
        command = [NGINX, "-p", str(tmp_path), "-c", str(whole), "-g", "daemon off; master_process off;"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as nginx:
            try:
                wait_for(lambda: answers(public))
                honest = door.add("honest")
                for path in ("/v1/control/list-runs", "/docs", "/v1/fleet/register-node", "/health"):
                    refused = door.post(path, key=honest.key)
                    assert (refused.status_code, refused.headers["server"]) == (404, "nginx")
                assert door.post(SMALL_ROUTES[0], method="GET", key=honest.key).status_code == 403
                assert door.post(SMALL_ROUTES[0], bytes(5000), key=honest.key).status_code == 413
                stranger = door.post(SMALL_ROUTES[0])
                assert (stranger.status_code, stranger.json()) == (401, {"detail": "its key is not enrolled"})
                with node_client(door, honest.key) as (client, number):
                    for _ in range(20):
                        client.PullMessages(PullMessagesRequest(node=Node(node_id=number)))
            finally:
                nginx.terminate()


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
