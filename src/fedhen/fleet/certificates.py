"""Certificates and keys for testing: a certificate authority, one server certificate, and a key for every node."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 365
CA, SERVER, SERVER_KEY = "ca.crt", "server.crt", "server.key"


def write_certificates(folder: Path, hosts: Iterable[str]) -> None:
    """Writes a new authority's certificate and a server certificate for these hosts.

    The authority's key is discarded, so that no other certificate can be signed with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    name, now = _name("fedhen test authority"), datetime.datetime.now(datetime.UTC)
    root = _certificate(name, name, authority.public_key(), now).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    root = root.add_extension(_usage(sign=True), critical=True).add_extension(
        x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False
    )
    leaf = _certificate(_name("fedhen server"), name, server.public_key(), now)
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName([_host(host) for host in hosts]), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False),
    ):
        leaf = leaf.add_extension(extension, critical=critical)
    pem = serialization.Encoding.PEM
    (folder / CA).write_bytes(root.sign(authority, hashes.SHA384()).public_bytes(pem))
    (folder / SERVER).write_bytes(leaf.sign(authority, hashes.SHA384()).public_bytes(pem))
    _write_secret(folder / SERVER_KEY, _private_bytes(server))


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
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime
) -> x509.CertificateBuilder:
    # Valid from an hour ago, because clocks differ.
    begin = now - datetime.timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
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
