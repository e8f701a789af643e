"""A node's connection: Flower's node protocol over HTTP, with requests that are repeated while the server is away."""

from __future__ import annotations

import hashlib
import json
import random
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, RegisterNodeFleetRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedhen.errors import FleetError, one_line
from fedhen.fileio.atomic import write_text
from fedhen.fleet.node_file import NodeFile

T = TypeVar("T")
R = TypeVar("R")

SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Pauses before a request is repeated. They double, and each is shortened by up to a half at random."""
REFUSALS = 3
"""A node ends when its key is refused this often in a row: the server may read its list of nodes at that moment."""
NODE_ID = "node-id"
"""The file in the state folder with Flower's number of the node."""


class Refused(FleetError):
    """The server refuses the node's key."""


class RunEnded(Exception):
    """The run that a message belongs to is over."""


class Rejected(Exception):
    """The server does not take what was sent. To repeat it is of no use."""


class Closed(Exception):
    """The connection was closed while a thread waited to repeat a request."""


class Lost(NamedTuple):
    """Why a request was not answered."""

    reason: str
    refused: bool = False


@dataclass
class NodeConnection:
    """The connection of one node."""

    file: NodeFile
    state: Path
    log: Callable[[str], None]
    node: Node = field(default_factory=Node)

    def __post_init__(self) -> None:
        self.key = read_private_key(self.file.key, self.file.name)
        self.public = public_key_to_bytes(self.key.public_key())
        self.closed = threading.Event()
        self.is_lost = False
        sender = NodeAuthHttpInterceptor(self.key, self.key.public_key())
        certificate = self.file.certificate.encode()
        try:
            self.client = FleetHttpClient.from_server_address(
                self.file.address, not certificate, certificate or None, [sender]
            )
        except (ssl.SSLError, UnicodeError):
            raise FleetError(f"the certificate in the file of node {self.file.name} cannot be read") from None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Connects the node. Afterwards the server knows that it is gone."""
        beats = threading.Thread(target=self.beat, daemon=True)
        try:
            self.activate()
            beats.start()
            yield
        finally:
            self.closed.set()
            if self.node.node_id:
                self.deactivate(self.node.node_id)
            self.client.close()

    def activate(self) -> None:
        """Connects as a node that the server knows. It returns at once, even if its process was killed before."""
        if not self.file.certificate:
            # Without TLS there are no keys to check: the node registers its own, once.
            with suppress(Rejected):
                self.call(self.client.RegisterNode, RegisterNodeFleetRequest(public_key=self.public))
        if before := self.read_node_id():
            self.deactivate(before)
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        pause, attempts = SHORTEST_PAUSE, 0
        while not self.node.node_id:
            try:
                self.node.node_id = self.call(self.client.ActivateNode, request).node_id
            except Rejected:
                attempts += 1
                # The first time it may only just have been enrolled.
                if attempts == 2:
                    self.log(
                        "the server does not admit this node: another process uses its file, or was killed less than a "
                        "minute ago; trying again"
                    )
                pause = self.wait(pause)
        with suppress(OSError):
            write_text(self.state / NODE_ID, f"{self.fingerprint} {self.node.node_id}\n")

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.public + self.file.address.encode()).hexdigest()

    def read_node_id(self) -> int:
        """Returns the number that the server gave this node before, or 0."""
        with suppress(OSError, ValueError):
            fingerprint, number = (self.state / NODE_ID).read_text(encoding="ascii").split()
            return int(number) if fingerprint == self.fingerprint else 0
        return 0

    def deactivate(self, number: int) -> None:
        """Tells the server that the node is gone, if it listens."""
        with suppress(httpx.HTTPError, ValueError, RuntimeError):
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=number))

    def beat(self) -> None:
        """Tells the server now and then that the node is there, until the connection is closed."""
        request = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        pause = HEARTBEAT_DEFAULT_INTERVAL * 0.7
        while not self.closed.wait(pause * random.uniform(0.8, 1.0)):
            try:
                self.client.SendNodeHeartbeat(request)
                pause = HEARTBEAT_DEFAULT_INTERVAL * 0.7
            except (httpx.HTTPError, ValueError, RuntimeError):
                pause = HEARTBEAT_DEFAULT_INTERVAL * 0.2

    def call(self, send: Callable[[T], R], request: T) -> R:
        """Sends a request until it is answered.

        Raises `FleetError` if it never will be, and `RunEnded` or `Rejected` if the server does not want it.
        """
        pause, refusals = SHORTEST_PAUSE, 0
        while True:
            if self.closed.is_set():
                raise Closed
            try:
                response = send(request)
            except (httpx.HTTPError, ValueError) as error:
                lost = self.judge(error)
                refusals += lost.refused
                if refusals >= REFUSALS:
                    raise Refused(
                        f"the server at {self.file.address} refuses node {self.file.name}: {lost.reason}; was it "
                        "removed? Its operator enrols it again with `fedhen fleet add`"
                    ) from None
                if not self.is_lost and not lost.refused:
                    self.is_lost = True
                    self.log(f"the server at {self.file.address} does not answer ({lost.reason}); trying again")
                pause = self.wait(pause)
            else:
                self.note_answer()
                return response

    def note_answer(self) -> None:
        if self.is_lost:
            self.is_lost = False
            self.log("the server answers again")

    def judge(self, error: Exception) -> Lost:
        """Returns why a request was not answered. Raises if it must not be repeated."""
        if isinstance(error, httpx.HTTPStatusError):
            status, detail = error.response.status_code, read_detail(error.response)
            if status < httpx.codes.INTERNAL_SERVER_ERROR:
                self.note_answer()
            if status == httpx.codes.UNAUTHORIZED:
                return Lost(detail, refused=True)
            if status == httpx.codes.FORBIDDEN:
                raise RunEnded from None
            if status < httpx.codes.INTERNAL_SERVER_ERROR:
                raise Rejected(detail) from None
            return Lost(detail)
        if reason := find_certificate_error(error):
            raise FleetError(
                f"the server at {self.file.address} has not the certificate that the node's file names ({reason}): "
                "ask its operator for a new file"
            ) from None
        return Lost(one_line(str(error)) or type(error).__name__)

    def wait(self, pause: float) -> float:
        """Waits, and returns the next pause. A closed connection ends it."""
        if self.closed.wait(pause * random.uniform(0.5, 1.0)):
            raise Closed
        return min(2 * pause, LONGEST_PAUSE)


def read_private_key(text: str, name: str) -> ec.EllipticCurvePrivateKey:
    """Reads the private key of a node. Raises `FleetError` if it is not one that Flower accepts."""
    if not text:
        raise FleetError(f"the file of node {name} has no key: name the file with its private key with --key")
    try:
        key = load_ssh_private_key(text.encode(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FleetError(f"the key of node {name} is not a private ECDSA key in OpenSSH's format without a password")
    return key


def read_detail(response: httpx.Response) -> str:
    """Returns what the server says of an error."""
    try:
        said = str(json.loads(response.text)["detail"])
    except (ValueError, KeyError, TypeError):
        said = ""
    return one_line(said)[:200] or f"HTTP {response.status_code}"


def find_certificate_error(error: BaseException | None) -> str:
    """Returns why the server's certificate is not accepted, or "" if that is not the reason of an error."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message
        error = error.__cause__ or error.__context__
    return ""
