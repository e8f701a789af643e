"""The server's certificate is renewed before it ends, and nodes with older files trust the new one."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509

from fedhen.fleet.certificates import CA, CA_KEY, SERVER, SERVER_KEY, find_end, renew_certificate, write_certificates
from fedhen.fleet.project import CERTIFICATES, LOCAL, FleetProject
from fedhen.fleet.serve import Server, open_server

pytestmark = pytest.mark.fleet


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fleet's folder whose certificates end in 20 days."""
    project = FleetProject(tmp_path / "fleet", "127.0.0.1:1", public="127.0.0.1:2")
    project.home.mkdir(parents=True)
    project.write_connection()
    project.write_gate()
    write_certificates(project.path / CERTIFICATES, ["127.0.0.1", "localhost"], days=20)
    write_certificates(project.path / CERTIFICATES / LOCAL, ["127.0.0.1", "localhost"], days=20)
    return project.path


def shake_hands(trusted: Path, server: Path) -> str:
    """Connects over TLS as a node and a gate do. Returns the serial number of the server's certificate."""
    ours, theirs = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / SERVER, server / SERVER_KEY)

    def answer() -> None:
        with context.wrap_socket(theirs, server_side=True) as secure:
            secure.recv(1)

    serving = threading.Thread(target=answer)
    serving.start()
    with ssl.create_default_context(cafile=trusted).wrap_socket(ours, server_hostname="127.0.0.1") as secure:
        found = str((secure.getpeercert() or {})["serialNumber"])
        secure.send(b"x")
    serving.join()
    return found


def days_left(folder: Path) -> int:
    return (find_end(folder) - datetime.datetime.now(datetime.UTC)).days


def test_a_certificate_that_ends_soon_is_renewed_for_those_who_trust_the_authority(folder: Path) -> None:
    said: list[str] = []
    public, local = folder / CERTIFICATES, folder / CERTIFICATES / LOCAL
    trusted, secret = (public / CA).read_bytes(), (public / SERVER_KEY).read_bytes()
    before, end = shake_hands(public / CA, public), find_end(public)
    open_server(folder, said.append).renew()
    assert said == [f"the server's certificate ends on {end:%Y-%m-%d}: it was renewed"]
    assert shake_hands(public / CA, public) != before
    assert ((public / CA).read_bytes(), (public / SERVER_KEY).read_bytes()) == (trusted, secret)
    assert days_left(public) == 364
    # That of loopback has no node that trusts it: it is replaced as a whole when the server starts.
    assert days_left(local) == 3649 and shake_hands(local / CA, local)
    # It is not renewed again, and it is not looked at again within the hour.
    server = open_server(folder, said.append)
    server.renew()
    assert len(said) == 1


@pytest.mark.parametrize("why", ["no key", "another authority's key", "garbage"])
def test_without_the_authoritys_key_the_operator_is_told(why: str, folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    public = folder / CERTIFICATES
    write_certificates(tmp_path / "other", ["127.0.0.1"])
    content = {"another authority's key": (tmp_path / "other" / CA_KEY).read_bytes(), "garbage": b"garbage"}
    (public / CA_KEY).unlink()
    if why in content:
        (public / CA_KEY).write_bytes(content[why])
    certificate = (public / SERVER).read_bytes()
    server: Server = open_server(folder, said.append)
    server.renew()
    assert said == [
        f"the server's certificate ends on {find_end(public):%Y-%m-%d}: renew it: the fleet has not the key of its "
        "authority"
    ]
    assert (public / SERVER).read_bytes() == certificate and not renew_certificate(public)


def test_secrets_are_for_their_owner(folder: Path) -> None:
    for place in (folder / CERTIFICATES, folder / CERTIFICATES / LOCAL):
        assert {(place / name).stat().st_mode & 0o777 for name in (CA_KEY, SERVER_KEY)} == {0o600}
        authority = x509.load_pem_x509_certificate((place / CA).read_bytes())
        assert (authority.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days == 3649
