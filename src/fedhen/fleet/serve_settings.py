"""serve.toml in a fleet's folder: where nodes connect, where the SuperLink listens, and the limits of the gate."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedhen.errors import FleetError
from fedhen.fileio import untrusted
from fedhen.fileio.atomic import write_text

SERVE = "serve.toml"
LAST_PORT = 65535
TEXT = """\
# What `fedhen fleet serve` reads.

# Where nodes connect. The certificate in certificates/ must be valid for this host.
address = @ADDRESS@
# Where the gate listens: an empty host stands for all addresses of this machine.
listen = @LISTEN@
# Where Flower's SuperLink listens. Only this machine may reach it: it obeys everyone who does.
superlink = @SUPERLINK@

# Limits of the gate, if the defaults do not suit; docs/fleet.md lists them.
# [limits]
# answer_bytes = 1073741824
"""


@dataclass(frozen=True)
class ServeSettings:
    """What `fedhen fleet serve` needs to know besides the fleet's folder."""

    address: str
    listen: str
    superlink: str
    limits: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        text = TEXT
        for name in ("address", "listen", "superlink"):
            text = text.replace(f"@{name.upper()}@", json.dumps(getattr(self, name)))
        write_text(folder / SERVE, text)


def read_serve_settings(folder: Path) -> ServeSettings | None:
    """Reads serve.toml. Returns None if it does not exist. Raises `FleetError` if it is damaged."""
    path = folder / SERVE
    if not path.is_file():
        return None
    try:
        values = untrusted.read_toml(path)
        texts = {name: untrusted.check_text(values[name]) for name in ("address", "listen", "superlink")}
        settings = ServeSettings(**texts, limits=dict(untrusted.check_mapping(values.get("limits", {}))))
    except (OSError, *untrusted.PARSE_ERRORS) as error:
        raise FleetError(f"{path} cannot be read: {untrusted.describe_error(error)}") from None
    for name, text in texts.items():
        split_address(text, f"{name} in {path}", empty_host=name == "listen")
    return settings


def split_address(text: str, what: str, empty_host: bool = False) -> tuple[str, int]:
    """Returns host and port of HOST:PORT. Raises `FleetError` if it is not that."""
    host, _, port = text.rpartition(":")
    if not (host or empty_host) or not (port.isascii() and port.isdigit() and 1 <= int(port) <= LAST_PORT):
        raise FleetError(f"{what} {text!r}: write HOST:PORT, like 127.0.0.1:8000")
    return host.strip("[]"), int(port)
