"""The folder of a fleet: the app that Flower ships, its settings and, for testing, certificates, keys and data."""

from __future__ import annotations

import ipaddress
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from types import MappingProxyType

from fedhen.config import toml
from fedhen.config.settings import Config
from fedhen.errors import FleetError
from fedhen.fileio import untrusted
from fedhen.fleet.certificates import AUTHORITY_DAYS, CA, SERVER, SERVER_KEY, write_certificates, write_node_key
from fedhen.fleet.serve_settings import ServeSettings, read_serve_settings

SETTINGS, CERTIFICATES, KEYS, DATA, NODES, HOME = "config.toml", "certificates", "keys", "data", "nodes", "flower"
LOCAL = "local"
"""The folder in `CERTIFICATES` with the certificates for connections inside this machine."""
DATABASE, LOGS = "superlink.db", "logs"
IGNORED = (f"{KEYS}/", f"{CERTIFICATES}/**/*.key", f"{NODES}/", f"{HOME}/", f"{DATA}/", f"{DATABASE}*", f"{LOGS}/")
"""Secrets, data and what a run writes. These do not belong in a repository."""
CONNECTION = "fleet"
"""The name of this SuperLink in Flower's own commands."""
RECIPE_APPS = '''"""For a local fleet: every node deals the recipe's data as a simulation does, and keeps its shard."""

from fedhen.fleet.app import recipe_app
from fedhen.fleet.apps import client_app, server_app

client = client_app(recipe_app())
server = server_app(recipe_app())
'''


@dataclass(frozen=True)
class FleetProject:
    """A fleet's folder and the address of its SuperLink."""

    path: Path
    address: str
    secure: bool = True
    public: str = ""
    """The address at which nodes connect to the gate; empty if they connect to the SuperLink."""

    @property
    def certificates(self) -> Path:
        """The folder with the certificates of the SuperLink."""
        local = self.path / CERTIFICATES / LOCAL
        return local if self.public or local.is_dir() else self.path / CERTIFICATES

    @property
    def home(self) -> Path:
        """The folder in which Flower's own commands find the connection."""
        return self.path / HOME

    def write(self, config: Config, nodes: Mapping[str, int] = MappingProxyType({})) -> None:
        """Writes the whole folder, which must be new, with a key for each of these nodes."""
        self.write_app(config)
        host = (self.public or self.address).rpartition(":")[0].strip("[]")
        if self.secure:
            write_certificates(self.path / CERTIFICATES, dict.fromkeys(["127.0.0.1", "localhost", host]))
            for name in node_names(nodes):
                write_node_key(self.path / KEYS / name)
        if self.public:
            self.write_gate()

    def write_gate(self) -> None:
        """Writes what `fedhen fleet serve` needs: its addresses, and certificates for loopback."""
        known = self.public.rpartition(":")
        listen = self.public if is_loopback(known[0]) else f":{known[2]}"
        ServeSettings(self.public, listen, self.address).write(self.path)
        self.write_local_certificates()

    def write_local_certificates(self) -> None:
        """Writes the certificates of the SuperLink, which only programs of this machine trust."""
        write_certificates(self.path / CERTIFICATES / LOCAL, ["127.0.0.1", "localhost"], AUTHORITY_DAYS)

    def write_app(self, config: Config) -> None:
        """Writes the app, its settings and the connection."""
        with as_file(files("fedhen.fleet") / "template") as template:
            shutil.copytree(template, self.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        data = self.path / "fleet_app" / "data.py"
        data.write_text(data.read_text().replace("@TEST@", str((self.path / DATA / "test.npz").resolve())))
        (self.path / SETTINGS).write_text(toml.to_toml(config, comments=True), encoding="utf-8")
        (self.path / ".gitignore").write_text("".join(f"{name}\n" for name in IGNORED), encoding="utf-8")
        self.write_connection()

    def write_connection(self) -> None:
        """Writes the connection for Flower's own commands."""
        self.home.mkdir(exist_ok=True)
        trust = f'root-certificates = "{(self.certificates / CA).resolve()}"' if self.secure else "insecure = true"
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n{trust}\n',
            encoding="utf-8",
        )

    def use_recipe_data(self) -> None:
        """Replaces the app by that of a local fleet, in which the nodes deal the recipe's data."""
        (self.path / "fleet_app" / "apps.py").write_text(RECIPE_APPS, encoding="utf-8")

    def superlink_command(self, database: Path | None = None) -> list[str]:
        """Returns the command that starts the SuperLink."""
        host, _, port = self.address.rpartition(":")
        certificates = self.certificates
        tls = [
            *("--ssl-ca-certfile", str(certificates / CA), "--ssl-certfile", str(certificates / SERVER)),
            *("--ssl-keyfile", str(certificates / SERVER_KEY), "--enable-supernode-auth"),
        ]
        return [
            *("flower-superlink", "--host", host, "--port", port, "--disable-runtime-dependency-installation"),
            *(["--database", str(database)] if database else []),
            *(tls if self.secure else ["--insecure"]),
        ]

    def server_line(self) -> str:
        """Returns the command that starts the server of this fleet, for a shell."""
        return shlex.join(["fedhen", "fleet", "serve", str(self.path)]) if self.public else self.superlink_line()

    def superlink_line(self) -> str:
        """Returns the command that starts the SuperLink, for a shell, with a database of nodes and runs."""
        return shell_line(self.superlink_command(self.path / DATABASE), self.path / NODES / "superlink")

    def supernode_command(self, name: str, port: int, node: Mapping[str, str | int]) -> list[str]:
        """Returns the command that starts a node with its key and its settings."""
        key = self.path / KEYS / name
        settings = " ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in node.items())
        tls = [
            *("--root-certificates", str(self.path / CERTIFICATES / CA)),
            *("--auth-supernode-private-key", str(key)),
        ]
        return [
            *("flower-supernode", "--superlink", self.address, "--port", str(port)),
            *(["--node-config", settings] if settings else []),
            *(tls if self.secure else ["--insecure"]),
        ]

    def register_command(self, name: str) -> list[str]:
        """Returns the command that registers a node's key at the SuperLink."""
        return ["flwr", "supernode", "register", str((self.path / KEYS / f"{name}.pub").absolute()), CONNECTION]


def open_project(path: Path) -> FleetProject:
    """Opens an existing fleet folder."""
    file = path / HOME / "config.toml"
    try:
        connection = untrusted.read_toml(file)["superlink"][CONNECTION]
        settings = read_serve_settings(path)
        return FleetProject(
            path,
            untrusted.check_text(connection["address"]),
            not connection.get("insecure", False),
            settings.address if settings is not None else "",
        )
    except (OSError, *untrusted.PARSE_ERRORS):
        raise FleetError(f"{path} is not a fleet's folder: create one with `fedhen fleet init DIR`") from None


def is_loopback(host: str) -> bool:
    """Returns whether a host is this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def shell_line(command: Sequence[str], home: Path) -> str:
    """Returns a Flower command as a line for a shell."""
    return f"FLWR_TELEMETRY_ENABLED=0 FLWR_HOME={shlex.quote(str(home))} {shlex.join(command)}"


def run_line(path: Path, resume: Path | None = None) -> str:
    """Returns the command that starts or resumes a run, for use in any working directory."""
    more = [] if resume is None else ["--resume", str(resume.resolve())]
    return shlex.join(["fedhen", "fleet", "run", str(path), *more])


def node_names(nodes: Mapping[str, int]) -> list[str]:
    """Returns a name for every node: simple-1, simple-2, complex-1."""
    return [f"{tier}-{number + 1}" for tier, many in nodes.items() for number in range(many)]


def fit_to_nodes(config: Config, nodes: Mapping[str, int], active: int | None = None) -> Config:
    """Returns the configuration for a fleet with these nodes, all of them active unless `active` is given."""
    if unknown := [tier for tier in nodes if tier not in config.tiers]:
        raise FleetError(f"{config.recipe} has no tier {unknown[0]!r}: choose from {', '.join(config.tiers)}")
    if missing := [tier for tier in config.tiers if nodes.get(tier, 0) < 1]:
        raise FleetError(f"tier {missing[0]!r} has no node: give it at least one")
    number = sum(nodes.values())
    if active is not None and not 1 <= active <= number:
        raise FleetError(f"--active {active}: choose between 1 and {number}, the number of nodes")
    devices = replace(config.devices, number=number, active=number if active is None else active, tiers=())
    return replace(config, devices=devices, tiers={tier: nodes[tier] / number for tier in config.tiers})
