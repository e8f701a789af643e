"""Files that run a fleet as services: systemd units, a Dockerfile, a compose file, and a start script for each node."""

from __future__ import annotations

import getpass
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

SERVICES = "services"
SCRIPTS = "start"

_UNIT = """\
# @ABOUT@
# Copy it to /etc/systemd/system, then: systemctl enable --now @NAME@
[Unit]
Description=@DESCRIPTION@
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
User=@USER@
ExecStart=@COMMAND@
Restart=on-failure
RestartSec=5
# SIGTERM ends it in order; what has not ended by then is killed.
TimeoutStopSec=30
# A message is received whole before it can be checked: adapt the limit to the largest model and the number of nodes.
MemoryMax=@MEMORY@
LimitNOFILE=65536
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=full
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes

[Install]
WantedBy=multi-user.target
"""
_DOCKERFILE = """\
# An image for server and nodes. Put the wheel of fedhen next to this file: pip wheel --no-deps -w . /path/to/fedhen
FROM python:3.12-slim
RUN useradd --create-home --uid 1000 fedhen
COPY fedhen-*.whl /tmp/
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \\
    "$(echo /tmp/fedhen-*.whl)[flower]" && rm /tmp/fedhen-*.whl
USER fedhen
ENTRYPOINT ["fedhen", "fleet"]
"""
_COMPOSE = """\
# docker compose up -d server; on a node's own machine: docker compose up -d node
services:
  server:
    build: .
    command: [serve, /fleet]
    restart: unless-stopped
    # Only the gate's port is reachable. Trainings are started with: docker compose exec server fedhen fleet run /fleet
    ports: ["@PORT@:@PORT@"]
    volumes: ["@FOLDER@:/fleet"]
    mem_limit: 8g
    init: true
    stop_grace_period: 30s

  node:
    build: .
    command: [node, /node.toml, --data, /data, --state, /state]
    restart: unless-stopped
    # The node's file as `fedhen fleet add` wrote it, its data, and a folder for what must survive a restart.
    volumes: ["./node.toml:/node.toml:ro", "./data:/data:ro", "./state:/state"]
    mem_limit: 8g
    init: true
    stop_grace_period: 30s
"""
_SCRIPT = """\
#!/bin/sh
# Starts node @NAME@ from the file that `fedhen fleet add @NAME@` has written; the first argument is other data.
set -eu
fleet=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
exec @FEDHEN@ fleet node "$fleet/nodes/@NAME@.toml" --data "${1:-$fleet/data/@NAME@.npz}" --state "$fleet/nodes/@NAME@"
"""


def write_services(folder: Path, address: str, nodes: Iterable[str]) -> None:
    """Writes the files into a fleet's folder."""
    services = folder / SERVICES
    (services / SCRIPTS).mkdir(parents=True)
    fedhen = shlex.join([sys.executable, "-m", "fedhen"])
    for name, text in make_units(folder, fedhen).items():
        (services / name).write_text(text, encoding="utf-8")
    (services / "Dockerfile").write_text(_DOCKERFILE, encoding="utf-8")
    compose = _COMPOSE.replace("@PORT@", address.rpartition(":")[2]).replace("@FOLDER@", str(folder))
    (services / "compose.yaml").write_text(compose, encoding="utf-8")
    for name in nodes:
        script = services / SCRIPTS / f"{name}.sh"
        script.write_text(_SCRIPT.replace("@NAME@", name).replace("@FEDHEN@", fedhen), encoding="utf-8")
        script.chmod(0o755)


def make_units(folder: Path, fedhen: str) -> dict[str, str]:
    """Returns file name -> systemd unit: of the server, of its page, and of nodes by name."""
    place = quote_unit(str(folder))
    return {
        "fedhen-server.service": make_unit(
            "fedhen-server",
            "The server side of a fleet: gate and SuperLink.",
            "fedhen fleet server",
            f"{fedhen} fleet serve {place}",
            "8G",
        ),
        "fedhen-page.service": make_unit(
            "fedhen-page",
            "The live page of a fleet, on this machine only.",
            "fedhen fleet page",
            f"{fedhen} fleet page {place} --listen 127.0.0.1:8080",
            "1G",
        ),
        "fedhen-node@.service": make_unit(
            "fedhen-node@NAME",
            "A node, on its own machine: /etc/fedhen/NAME.toml is its file, /var/lib/fedhen/NAME/data its data.",
            "fedhen fleet node %i",
            f"{fedhen} fleet node /etc/fedhen/%i.toml --data /var/lib/fedhen/%i/data --state /var/lib/fedhen/%i/state",
            "8G",
        ),
    }


def make_unit(name: str, about: str, description: str, command: str, memory: str) -> str:
    values = {"NAME": name, "ABOUT": about, "DESCRIPTION": description, "COMMAND": command, "MEMORY": memory}
    text = _UNIT
    for key, value in {**values, "USER": find_user()}.items():
        text = text.replace(f"@{key}@", value)
    return text


def quote_unit(text: str) -> str:
    """Returns a path as an argument in a unit, where % begins a specifier and $ a variable."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != text or " " in text else text


def find_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "fedhen"
