"""Certificates and keys of a fleet: its authority, the server's certificate, which is renewed, and keys of nodes."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedhen.errors import FleetError, one_line
from fedhen.fileio.atomic import replace_file

VALID_DAYS, AUTHORITY_DAYS, RENEW_DAYS = 365, 3650, 30
"""A server's certificate is renewed this many days before it ends."""
CA, CA_KEY, SERVER, SERVER_KEY = "ca.crt", "ca.key", "server.crt", "server.key"


def write_certificates(folder: Path, hosts: Iterable[str], days: int = VALID_DAYS) -> None:
    """Writes a new authority with its key, and a server certificate for these hosts."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    name = _name("fedhen test authority")
    root = _certificate(name, name, authority.public_key(), AUTHORITY_DAYS).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    root = root.add_extension(_usage(sign=True), critical=True).add_extension(
        x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False
    )
    signed = root.sign(authority, hashes.SHA384())
    leaf = _sign_server(signed, authority, server.public_key(), [_host(host) for host in hosts], days)
    (folder / CA).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / SERVER).write_bytes(leaf)
    _write_secret(folder / CA_KEY, _private_bytes(authority))
    _write_secret(folder / SERVER_KEY, _private_bytes(server))


def find_end(folder: Path) -> datetime.datetime:
    """Returns when the server's certificate ends. Raises `FleetError` if it cannot be read."""
    return _read_certificate(folder / SERVER).not_valid_after_utc


def ends_soon(folder: Path) -> bool:
    """Returns whether the server's certificate has to be renewed."""
    return find_end(folder) - datetime.datetime.now(datetime.UTC) < datetime.timedelta(days=RENEW_DAYS)


def renew_certificate(folder: Path) -> bool:
    """Replaces the server's certificate by one for the same key and hosts, which the nodes' files already trust.

    Returns False if the key of the authority is not there, or is that of another one.
    """
    root, before = _read_certificate(folder / CA), _read_certificate(folder / SERVER)
    try:
        authority = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        return False
    key = before.public_key()
    if not isinstance(authority, ec.EllipticCurvePrivateKey) or not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    if authority.public_key() != root.public_key():
        return False
    hosts = before.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    replace_file(folder / SERVER, _sign_server(root, authority, key, list(hosts), VALID_DAYS))
    return True


def _sign_server(
    root: x509.Certificate,
    authority: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePublicKey,
    hosts: list[x509.GeneralName],
    days: int,
) -> bytes:
    leaf = _certificate(_name("fedhen server"), root.subject, key, days)
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName(hosts), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False),
    ):
        leaf = leaf.add_extension(extension, critical=critical)
    return leaf.sign(authority, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FleetError(f"{path} cannot be read as a certificate: {one_line(str(error))[:80]}") from None


def make_node_key() -> tuple[str, str]:
    """Makes the key of a node. Returns the private and the public key in OpenSSH's format."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return _private_bytes(key, serialization.PrivateFormat.OpenSSH).decode(), public.decode()


def write_node_key(path: Path) -> None:
    """Writes the private key of a node and, with the suffix .pub, the public key for the server."""
    path.parent.mkdir(parents=True, exist_ok=True)
    private, public = make_node_key()
    _write_secret(path, private.encode())
    path.with_name(path.name + ".pub").write_text(f"{public}\n", encoding="ascii")


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # An hour ago, because clocks differ.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(sign: bool) -> x509.KeyUsage:
    rest = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    return x509.KeyUsage(digital_signature=True, key_cert_sign=sign, crl_sign=sign, decipher_only=False, **rest)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private_bytes(
    key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8
) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write_secret(path: Path, content: bytes) -> None:
    # Created with mode 600: at no moment can others read it.
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
