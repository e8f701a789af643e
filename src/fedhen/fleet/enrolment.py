"""Enrolled nodes: the names, tiers and public keys that the operator of a fleet has accepted."""

from __future__ import annotations

import fcntl
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedhen.errors import FleetError
from fedhen.fileio import untrusted
from fedhen.fileio.atomic import write_json

ENROLLED = "enrolled.json"
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"


@dataclass(frozen=True)
class EnrolledNode:
    """A node that may connect."""

    name: str
    tier: str
    key: str
    """The public key in OpenSSH's format: `ecdsa-sha2-nistp384 AAAA...`."""

    def __post_init__(self) -> None:
        for text in (self.name, self.tier, self.key):
            untrusted.check_text(text)
        check_name(self.name)

    @property
    def pem(self) -> bytes:
        """The public key as Flower's nodes send it."""
        return read_public_key(self.key).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    @property
    def header(self) -> bytes:
        """The header of a request that has this key."""
        return b64encode(self.pem)


@dataclass(frozen=True)
class Enrolment:
    """The file with the enrolled nodes. Its changes take effect at once: the gate notices them."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / ENROLLED

    def read(self) -> dict[str, EnrolledNode]:
        """Returns name -> node."""
        try:
            values = untrusted.read_json(self.path) or {"nodes": []}
            nodes = [EnrolledNode(entry["name"], entry["tier"], entry["key"]) for entry in values["nodes"]]
        except (OSError, FleetError, *untrusted.PARSE_ERRORS) as error:
            raise FleetError(f"{self.path} is damaged ({untrusted.describe_error(error)}): restore it") from None
        return {node.name: node for node in nodes}

    def add(self, node: EnrolledNode) -> None:
        """Enrols a node. Raises `FleetError` if another one has its name or its key."""
        with self._lock():
            nodes = self.read()
            if node.name in nodes:
                raise FleetError(f"node {node.name!r} is enrolled: choose another name, or remove it first")
            key = node.pem
            if same := [other.name for other in nodes.values() if other.pem == key]:
                raise FleetError(f"node {same[0]!r} has the same key: every node needs a key of its own")
            self._write({**nodes, node.name: node})

    def remove(self, name: str) -> EnrolledNode:
        """Ends a node's access, and returns what it was."""
        with self._lock():
            nodes = self.read()
            if name not in nodes:
                known = ", ".join(sorted(nodes)) or "none"
                raise FleetError(f"no node {name!r} is enrolled; enrolled: {known}")
            removed = nodes.pop(name)
            self._write(nodes)
        return removed

    def _write(self, nodes: Mapping[str, EnrolledNode]) -> None:
        write_json(self.path, {"nodes": [asdict(nodes[name]) for name in sorted(nodes)]})

    @contextmanager
    def _lock(self) -> Iterator[None]:
        # Two commands at once must not lose a node.
        with (self.folder / f".{ENROLLED}.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def check_name(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise FleetError(f"node name {name[:80]!r}: use letters, digits, '.', '_' and '-', 63 at most")
    return name


def read_public_key(text: str) -> ec.EllipticCurvePublicKey:
    """Reads a public key in OpenSSH's format. Raises `FleetError` if it is not one that Flower accepts."""
    try:
        key = serialization.load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FleetError("not an ECDSA public key in OpenSSH's format: create one with ssh-keygen -t ecdsa -b 384")
    return key
