"""Files that run a fleet as services: systemd units, containers, a start script for each node, and nginx's settings."""

from __future__ import annotations

import getpass
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from fedhen.fleet.enrolment import Enrolment
from fedhen.fleet.gate_rules import Limits, Rules
from fedhen.fleet.project import CERTIFICATES, is_loopback

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
_NGINX = """\
# nginx before the gate, for those who have it anyway. Copy it to /etc/nginx/conf.d/fedhen.conf.
# It passes only what nodes need, and limits sizes, rates and connections. The gate stays behind it: it alone knows
# who is enrolled, and that an answer is one. In serve.toml:
#     listen = "127.0.0.1:@GATE@"
#     [limits]
#     # All nodes have one address there, and every request is a connection.
#     new_connections_per_second = 2000
#     connection_burst = 4000
#     strangers_per_address = 1024
# After the certificate was renewed: systemctl reload nginx
limit_req_zone $http_flwr_public_key zone=fedhen_nodes:10m rate=50r/s;
limit_conn_zone $binary_remote_addr zone=fedhen_addresses:10m;

server {
    listen @LISTEN@ ssl;
    ssl_certificate @CERTIFICATES@/server.crt";
    ssl_certificate_key @CERTIFICATES@/server.key";
    ssl_protocols TLSv1.2 TLSv1.3;
    server_tokens off;
    access_log off;
    client_header_timeout 10s;
    client_body_timeout 20s;
    send_timeout 20s;
    keepalive_timeout 90s;
    limit_req zone=fedhen_nodes burst=400;
    limit_conn fedhen_addresses 256;

    # Streams in both directions, to the gate only.
    proxy_request_buffering off;
    proxy_buffering off;
    proxy_http_version 1.1;
    proxy_read_timeout 120s;
    proxy_ssl_verify on;
    proxy_ssl_name localhost;
    proxy_ssl_trusted_certificate @CERTIFICATES@/ca.crt";

    location / { return 404; }
@LOCATIONS@}
"""
_LOCATION = """\
    location = @PATH@ {
        limit_except POST { deny all; }
        client_max_body_size @BYTES@;
        proxy_pass https://127.0.0.1:@GATE@;
    }
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
    (services / "nginx.conf").write_text(make_nginx(folder, address), encoding="utf-8")
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


def make_nginx(folder: Path, address: str) -> str:
    """Returns the settings of nginx before the gate, with the gate's default limits."""
    host, _, port = address.rpartition(":")
    gate = "8001" if port != "8001" else "8002"
    sizes = Rules(Enrolment(folder), Limits()).sizes
    locations = [
        _LOCATION.replace("@PATH@", path).replace("@BYTES@", str(most)) for path, most in sorted(sizes.items())
    ]
    certificates = str(folder / CERTIFICATES).replace("\\", "\\\\").replace('"', '\\"')
    text = _NGINX.replace("@LOCATIONS@", "".join(locations)).replace("@CERTIFICATES@", f'"{certificates}')
    listen = address if is_loopback(host) else port
    return text.replace("@LISTEN@", listen).replace("@GATE@", gate)


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
