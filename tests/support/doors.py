"""A fleet's server side as a process, and requests to its gate as a node or a stranger makes them."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedhen.cli import main
from fedhen.fleet.node_file import NodeFile, read_node_file
from fedhen.fleet.processes import MARK, free_port
from fedhen.fleet.serve import open_server
from fedhen.fleet.serve_settings import SERVE
from support.kills import wait_for


@dataclass
class Door:
    """A fleet's folder whose server runs."""

    folder: Path
    address: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def ca(self) -> Path:
        return self.folder / "certificates" / "ca.crt"

    @property
    def host(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    def add(self, name: str, tier: str = "simple") -> NodeFile:
        """Enrols a node, as its operator does, and waits until the SuperLink knows it."""
        path = self.folder.parent / f"{name}.toml"
        assert main(["fleet", "add", name, "--tier", tier, "--fleet", str(self.folder), "--out", str(path)]) == 0
        self.wait_for_line(f"registered node {name}, ")
        return read_node_file(path)

    def wait_for_line(self, text: str, seconds: float = 60.0) -> None:
        def is_said() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return text in self.log.read_text()

        wait_for(is_said, seconds)

    def post(self, path: str, body: bytes = b"", key: str = "", method: str = "POST", **more: str) -> httpx.Response:
        """Sends a request to the gate, signed with a private key if one is given."""
        headers = {"content-type": "application/protobuf", **more}
        with httpx.Client(verify=ssl.create_default_context(cafile=self.ca), trust_env=False, timeout=20) as client:
            request = client.build_request(method, f"https://{self.address}{path}", headers=headers, content=body)
            if key:
                sign(request, key)
            return client.send(request)

    def connect(self, source: str = "127.0.0.1") -> ssl.SSLSocket:
        """Opens a TLS connection to the gate."""
        plain = socket.create_connection(self.host, timeout=30, source_address=(source, 0))
        return ssl.create_default_context(cafile=self.ca).wrap_socket(plain, server_hostname=self.host[0])


def sign(request: httpx.Request, key: str) -> None:
    """Adds the headers with which Flower's own client signs its requests."""
    private = read_key(key)
    context = ProtobufRequestContext(rpc_method="", message=ActivateNodeRequest(), request=request)
    NodeAuthHttpInterceptor(private, private.public_key()).intercept(context, lambda _: httpx.Response(200))


def read_key(text: str) -> ec.EllipticCurvePrivateKey:
    key = load_ssh_private_key(text.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


@contextmanager
def node_client(door: Door, key: str | ec.EllipticCurvePrivateKey) -> Iterator[tuple[FleetHttpClient, int]]:
    """Connects as Flower's own node does. Yields the client and the node's id."""
    private = read_key(key) if isinstance(key, str) else key
    sender = NodeAuthHttpInterceptor(private, private.public_key())
    with FleetHttpClient.from_server_address(door.address, False, str(door.ca), [sender]) as client:
        public = public_key_to_bytes(private.public_key())
        number = client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30)).node_id
        try:
            yield client, number
        finally:
            # A node that was removed is refused.
            with suppress(httpx.HTTPStatusError):
                client.DeactivateNode(DeactivateNodeRequest(node_id=number))


def new_key() -> ec.EllipticCurvePrivateKey:
    return generate_key_pairs()[0]


@contextmanager
def open_door(folder: Path, limits: str = "", init: Sequence[str] = ()) -> Iterator[Door]:
    """Creates a fleet and runs its server. Afterwards no process is left."""
    address = f"127.0.0.1:{free_port()}"
    assert main(["fleet", "init", str(folder), "--address", address, *init]) == 0
    open_server(folder, print)
    (folder / SERVE).write_text((folder / SERVE).read_text() + limits)
    with serve(folder, address) as door:
        yield door


@contextmanager
def serve(folder: Path, address: str) -> Iterator[Door]:
    log = folder.parent / f"{folder.name}-serve.log"
    with (
        log.open("wb") as said,
        subprocess.Popen(
            [sys.executable, "-m", "fedhen", "fleet", "serve", str(folder)],
            stdout=said,
            stderr=said,
            env={**os.environ, MARK: ""},
        ) as process,
    ):
        door = Door(folder, address, process, log)
        try:
            door.wait_for_line("nodes connect to", 120)
            yield door
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
