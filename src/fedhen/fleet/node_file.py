"""The file of a node, all that it needs besides its data. `fedhen fleet add` writes it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from fedhen.errors import FleetError
from fedhen.fileio import untrusted
from fedhen.fleet.app_digest import DIGEST_PATTERN, build_bundle, digest_bundle
from fedhen.fleet.certificates import CA, make_node_key
from fedhen.fleet.enrolment import EnrolledNode, Enrolment, check_name, read_public_key
from fedhen.fleet.project import CERTIFICATES, SETTINGS, open_project
from fedhen.fleet.serve_settings import split_address

TEXT = """\
# A node of the fleet at @PLACE@. Whoever has this file is this node: keep it secret.
name = @NAME@
tier = @TIER@
address = @ADDRESS@
# The digest of the app that this node runs: read its code before you accept another one.
app = @APP@
certificate = '''
@CERTIFICATE@'''
"""


@dataclass(frozen=True)
class NodeFile:
    """The content of a node's file."""

    name: str
    tier: str
    address: str
    app: tuple[str, ...]
    """The digests of the apps that the node's operator has accepted."""
    certificate: str
    """The certificate of the authority that signed the server's."""
    key: str = ""
    """The private key; empty if the node's operator created it and keeps it in a file of its own."""

    def write(self, path: Path) -> None:
        """Writes the file, which only its owner can read."""
        text = TEXT.replace("@PLACE@", self.address).replace("@CERTIFICATE@", self.certificate)
        for name, value in (("NAME", self.name), ("TIER", self.tier), ("ADDRESS", self.address), ("APP", self.app)):
            text = text.replace(f"@{name}@", json.dumps(value))
        text += f"key = '''\n{self.key}'''\n" if self.key else ""
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise FleetError(f"{path} exists: choose another file with --out") from None
        except OSError as error:
            raise FleetError(f"{path} cannot be written: {error.strerror}") from None


def read_node_file(path: Path) -> NodeFile:
    """Reads a node's file. Raises `FleetError` if it is not one."""
    try:
        values = untrusted.read_toml(path)
        texts = {name: untrusted.check_text(values[name]) for name in ("name", "tier", "address", "certificate")}
        app = tuple(untrusted.check_text(digest) for digest in values["app"])
        if not all(re.fullmatch(DIGEST_PATTERN, digest) for digest in app):
            raise ValueError("app is not a list of digests")
        split_address(texts["address"], "address")
        return NodeFile(
            check_name(texts.pop("name")), **texts, app=app, key=untrusted.check_text(values.get("key", ""))
        )
    except OSError as error:
        raise FleetError(f"{path} cannot be read: {error.strerror}") from None
    except untrusted.PARSE_ERRORS as error:
        raise FleetError(
            f"{path} is not a node's file ({untrusted.describe_error(error)}): see `fedhen fleet add`"
        ) from None


def enrol(folder: Path, name: str, tier: str, out: Path, public: Path | None = None) -> None:
    """Enrols a node in a fleet and writes its file. Without a public key, creates a key, which is only in the file."""
    from fedhen.config.toml import read_toml

    project = open_project(folder)
    if not project.public:
        raise FleetError(f"{folder} was written by an older version: start `fedhen fleet serve {folder}` once")
    tiers = read_toml(folder / SETTINGS).tiers
    if tier not in tiers:
        raise FleetError(f"the fleet has no tier {tier!r}: choose from {', '.join(tiers)}")
    if public is None:
        private, key = make_node_key()
    else:
        try:
            private, key = "", public.read_text(encoding="utf-8").strip()
            read_public_key(key)
        except (OSError, UnicodeDecodeError, FleetError) as error:
            raise FleetError(f"{public} is not a public key: {error}") from None
    node = EnrolledNode(check_name(name), tier, key)
    app = digest_bundle(build_bundle(folder))
    certificate = (folder / CERTIFICATES / CA).read_text(encoding="ascii")
    enrolment = Enrolment(folder)
    if name in enrolment.read():
        enrolment.add(node)  # Raises, before anything is written.
    NodeFile(name, tier, project.public, (app,), certificate, private).write(out)
    try:
        enrolment.add(node)
    except FleetError:
        out.unlink()
        raise
