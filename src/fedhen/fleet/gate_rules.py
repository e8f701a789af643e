"""The rules of the gate: which requests of which nodes pass to the SuperLink, how large, and how often."""

from __future__ import annotations

import binascii
import datetime
import time
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import SUPERLINK_NODE_ID, SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from google.protobuf.message import DecodeError

from fedhen.errors import FleetError
from fedhen.fileio import untrusted
from fedhen.fleet.enrolment import Enrolment, read_public_key

PUSH_MESSAGES, PUSH_OBJECT = "/v1/fleet/push-messages", "/v1/fleet/push-object"
SMALL_ROUTES = (
    *("/v1/fleet/activate-node", "/v1/fleet/deactivate-node", "/v1/fleet/send-node-heartbeat"),
    *("/v1/fleet/pull-messages", "/v1/fleet/get-run", "/v1/fleet/get-fab", "/v1/fleet/pull-object"),
    "/v1/fleet/confirm-message-received",
)
"""What nodes need besides: these requests are only a few numbers and names."""
OBJECT_ROUTES = (PUSH_OBJECT, "/v1/fleet/pull-object", "/v1/fleet/get-fab")
"""Requests or responses that may be large, and slow."""
PASSED_HEADERS = {b"content-type", b"accept", b"content-length"}
"""Headers that pass in both directions, besides those that begin with `flwr-`."""


@dataclass(frozen=True)
class Limits:
    """The limits of the gate. `[limits]` in serve.toml changes them."""

    small_bytes: int = 4096
    """Largest body of a request that is not listed below."""
    message_bytes: int = 2**18
    """Largest body of an answer's description: the names and sizes of its parts."""
    object_bytes: int = 6 * 2**20
    """Largest part of an answer. Flower cuts weights into parts of 5 MiB."""
    answer_bytes: int = 2**29
    """Largest sum of the parts that a node sends for one answer."""
    head_seconds: float = 10.0
    """Time for the TLS handshake, and for the head of a request, before a connection is known to be a node's."""
    idle_seconds: float = 90.0
    """Time between two requests of a node's connection."""
    grace_seconds: float = 20.0
    """How long a body or its reader may be slower than `bytes_per_second`."""
    bytes_per_second: float = 8192.0
    requests_per_second: float = 50.0
    """Requests of one node. Those beyond it wait."""
    request_burst: int = 400
    connections_per_node: int = 16
    strangers: int = 1024
    """Connections that have not yet made a node's request. Beyond it, the oldest of them is closed."""
    strangers_per_address: int = 256
    new_connections_per_second: float = 50.0
    """New connections from one address. Those beyond it wait."""
    connection_burst: int = 500
    upstream_connections: int = 256
    upstream_seconds: float = 120.0


class Refused(Exception):
    """A request that does not pass."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass
class Bucket:
    """Limits a rate: `take` returns how long to wait before the next event."""

    rate: float
    burst: float
    level: float = 0.0
    at: float = field(default_factory=time.monotonic)

    def take(self) -> float:
        now = time.monotonic()
        self.level = max(0.0, self.level - (now - self.at) * self.rate) + 1
        self.at = now
        return max(0.0, self.level - self.burst) / self.rate


@dataclass
class NodeState:
    """What the gate remembers of a node."""

    name: str
    key: ec.EllipticCurvePublicKey
    bucket: Bucket
    connections: int = 0
    answer_bytes: int = 0
    """Bytes of parts since the node last described an answer."""


@dataclass
class Rules:
    """Decides about requests."""

    enrolment: Enrolment
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        self.nodes: dict[bytes, NodeState] = {}
        """Header with the key -> node."""
        self.read_from: Any = None
        self.sizes = {
            PUSH_MESSAGES: self.limits.message_bytes,
            PUSH_OBJECT: self.limits.object_bytes,
            **dict.fromkeys(SMALL_ROUTES, self.limits.small_bytes),
        }

    def check_request(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> tuple[str, NodeState, int]:
        """Returns the path, the node and the length of the body. Raises `Refused` if the request does not pass."""
        path = target.decode("ascii", "replace")
        if method != b"POST" or path not in self.sizes:
            raise Refused(404, "it is not a request of a node")
        if b"content-encoding" in headers or b"transfer-encoding" in headers:
            raise Refused(411, "its body is encoded")
        length = int(headers.get(b"content-length", b"0"))
        node = self.authenticate(headers)
        if length > self.sizes[path]:
            raise Refused(413, f"its body is larger than {self.sizes[path]} bytes")
        if path == PUSH_OBJECT:
            node.answer_bytes += length
            if node.answer_bytes > self.limits.answer_bytes:
                raise Refused(413, f"its answer is larger than {self.limits.answer_bytes} bytes")
        return path, node, length

    def authenticate(self, headers: Mapping[bytes, bytes]) -> NodeState:
        """Returns the node that signed a request. The SuperLink checks again, and that the node names itself."""
        self.update_nodes()
        node = self.nodes.get(headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), b""))
        if node is None:
            raise Refused(401, "its key is not enrolled")
        try:
            timestamp = headers[TIMESTAMP_HEADER.encode()]
            signed = datetime.datetime.fromisoformat(timestamp.decode("ascii"))
            age = (datetime.datetime.now(datetime.UTC) - signed).total_seconds()
            if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
                raise Refused(401, "the clocks of node and server differ by more than the allowed seconds")
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.encode()], validate=True)
            node.key.verify(signature, timestamp, ec.ECDSA(hashes.SHA256()))
        except (KeyError, ValueError, TypeError, binascii.Error, InvalidSignature):
            raise Refused(401, "its signature is not valid") from None
        return node

    def update_nodes(self) -> None:
        """Reads the enrolled nodes again if they have changed, so that a removed node is out with its next request."""
        try:
            found = self.enrolment.path.stat()
            version = (found.st_mtime_ns, found.st_ino, found.st_size)
        except OSError:
            version = None
        if version == self.read_from:
            return
        try:
            enrolled = self.enrolment.read()
        except FleetError:
            # Nobody passes until the file is readable again.
            enrolled = {}
        limits = self.limits
        self.nodes = {
            node.header: self.nodes.get(node.header)
            or NodeState(node.name, read_public_key(node.key), Bucket(limits.requests_per_second, limits.request_burst))
            for node in enrolled.values()
        }
        self.read_from = version

    def check_answer(self, node: NodeState, body: bytes) -> None:
        """Checks the description of an answer: a node may only answer, and only for itself.

        The SuperLink accepts a message that names the server as its sender, and would deliver it to other nodes.
        """
        try:
            request = PushMessagesRequest.FromString(body)
        except DecodeError:
            raise Refused(400, "its message cannot be read") from None
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refused(400, "it does not have one message")
        about = request.messages_list[0].metadata
        honest = about.src_node_id == request.node.node_id and about.dst_node_id == SUPERLINK_NODE_ID
        if not honest or not about.reply_to_message_id:
            raise Refused(403, "its message is not an answer of this node")
        node.answer_bytes = 0


def read_limits(table: Mapping[str, Any]) -> Limits:
    """Reads `[limits]` of serve.toml. Raises `FleetError` if a name or a value is wrong."""
    known = vars(Limits())
    for name, value in table.items():
        if name not in known:
            raise FleetError(f"serve.toml has no limit {name!r}: choose from {', '.join(known)}")
        try:
            if type(known[name])(untrusted.check_number(value)) <= 0:
                raise ValueError("it is not above 0")
        except (TypeError, ValueError):
            raise FleetError(f"serve.toml: limits.{name} must be a number above 0") from None
    return Limits(**{name: type(known[name])(value) for name, value in table.items()})
