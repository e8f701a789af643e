"""Attacks on the gate of a real fleet's server, from its public port, with and without a registered node's key."""

from __future__ import annotations

import random
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx
import psutil
import pytest
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from fedhen.cli import main
from fedhen.fleet.certificates import renew_certificate
from fedhen.fleet.gate_rules import PUSH_MESSAGES, PUSH_OBJECT, SMALL_ROUTES, Limits
from fedhen.fleet.node_file import NodeFile
from fedhen.fleet.project import CERTIFICATES, open_project
from fedhen.fleet.registration import open_control
from support.doors import Door, new_key, node_client, open_door, sign
from support.kills import wait_for

pytestmark = [pytest.mark.fleet, pytest.mark.process, pytest.mark.xdist_group("gate")]

SHORT = "\n[limits]\nhead_seconds = 2\ngrace_seconds = 2\nnew_connections_per_second = 2000\nconnection_burst = 4000\n"
"""Less patience than the default, so that the tests are short."""
DOCUMENTATION = ("/docs", "/openapi.json", "/health", "/", "/v1/responses", "/docs/oauth2-redirect")


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with open_door(tmp_path_factory.mktemp("gate") / "demo", SHORT) as door:
        yield door


@pytest.fixture(scope="module")
def node(door: Door) -> NodeFile:
    return door.add("honest")


@pytest.fixture
def gate(door: Door, node: NodeFile) -> Iterator[int]:
    """The process of the gate, which must be the same after the test, and pass a node's requests."""
    pid = gate_of(door)
    yield pid
    assert gate_of(door) == pid
    with node_client(door, node.key) as (client, number):
        client.PullMessages(PullMessagesRequest(node=Node(node_id=number)))


def gate_of(door: Door) -> int:
    children = psutil.Process(door.process.pid).children(recursive=True)
    (found,) = (child.pid for child in children if "fedhen.fleet.gate_process" in " ".join(child.cmdline()))
    return int(found)


def test_every_other_path_is_refused(door: Door, node: NodeFile, gate: int) -> None:
    """Of all that the SuperLink serves, only ten paths pass, whoever signs. On loopback the others answer."""
    passed = {PUSH_MESSAGES, PUSH_OBJECT, *SMALL_ROUTES}
    paths = [path for _, path in PROTOBUF_REQUEST_TYPES]
    assert len(passed) == 10 and passed < {*paths} and len(paths) > 70
    spellings = ("/v1/fleet/../control/list-runs", "//v1/control/list-runs", "/v1/fleet/pull-messages/../register-node")
    for path in [*paths, *DOCUMENTATION, *spellings]:
        if path not in passed:
            assert door.post(path, key=node.key).status_code == 404, path
    for path in passed:
        assert door.post(path).status_code == 401
        assert door.post(path, method="GET", key=node.key).status_code == 404
    with open_control(open_project(door.folder)) as control:
        assert len(control.ListNodes(ListNodesRequest()).nodes_info) >= 1


def test_strangers_and_nodes_cannot_register_keys_or_act_for_others(door: Door, node: NodeFile, gate: int) -> None:
    stranger, other = new_key(), door.add("other")
    public = public_key_to_bytes(stranger.public_key())
    for path, body in (
        ("/v1/fleet/register-node", RegisterNodeFleetRequest(public_key=public)),
        ("/v1/control/register-node", RegisterNodeRequest(public_key=public)),
    ):
        assert door.post(path, body.SerializeToString(), key=node.key).status_code == 404
    with node_client(door, node.key) as (_, number), node_client(door, other.key) as (_, others):
        for request, status in (
            (PullMessagesRequest(node=Node(node_id=others)), 401),
            (PullMessagesRequest(node=Node(node_id=number)), 200),
        ):
            body = request.SerializeToString()
            assert door.post("/v1/fleet/pull-messages", body, key=node.key).status_code == status
        for change in (
            # The SuperLink takes this for an order of the server, and would deliver it to the other node.
            {"src_node_id": 1, "dst_node_id": others, "reply_to_message_id": ""},
            {"reply_to_message_id": ""},
            {"src_node_id": others},
            {"dst_node_id": others},
        ):
            answer = door.post(PUSH_MESSAGES, pushed(number, **change), key=node.key)
            assert answer.status_code == 403 and answer.json()["detail"].endswith("is not an answer of this node")
        # An answer passes the gate. The SuperLink has no such run, for which it has no better words.
        answer = door.post(PUSH_MESSAGES, pushed(number), key=node.key)
        assert answer.json() == {"detail": "Internal server error."}
    with pytest.raises(httpx.HTTPStatusError, match="401"), node_client(door, stranger):
        pass


def pushed(number: int, **change: object) -> bytes:
    """The description of an answer of a node, or of something else."""
    honest = {"src_node_id": number, "dst_node_id": 1, "reply_to_message_id": "a" * 64, "run_id": 1}
    message = Message(metadata=Metadata(**{**honest, **change}))  # type: ignore[arg-type]
    tree = ObjectTree(object_id="b" * 64)
    request = PushMessagesRequest(node=Node(node_id=number), messages_list=[message], message_object_trees=[tree])
    return bytes(request.SerializeToString())


def test_oversize_and_encoded_bodies(door: Door, node: NodeFile, gate: int) -> None:
    limits = Limits()
    for path, most in (
        (PUSH_OBJECT, limits.object_bytes),
        (PUSH_MESSAGES, limits.message_bytes),
        (SMALL_ROUTES[0], 4096),
    ):
        with suppress(httpx.WriteError):
            assert door.post(path, bytes(most + 1), key=node.key).status_code == 413
        # Garbage within the limit reaches the SuperLink, or the gate's own check: neither takes it.
        assert door.post(path, bytes(min(most, 5000)), key=node.key).status_code in (400, 413, 422)
    for more in ({"content-encoding": "gzip"}, {"transfer-encoding": "chunked"}):
        assert door.post(PUSH_OBJECT, b"5\r\nhello\r\n0\r\n\r\n", key=node.key, **more).status_code in (400, 411)


def test_slow_senders_are_dropped(door: Door, node: NodeFile, gate: int) -> None:
    """One sends no head, one only half of it, one a signed head and then a byte now and then."""
    request = httpx.Request("POST", f"https://{door.address}{PUSH_OBJECT}", headers={"content-length": "1000000"})
    sign(request, node.key)
    head = (
        b"POST "
        + PUSH_OBJECT.encode()
        + b" HTTP/1.1\r\n"
        + b"".join(name + b": " + value + b"\r\n" for name, value in request.headers.raw)
    )
    with ExitStack() as always:
        silent, half, drip = (always.enter_context(door.connect()) for _ in range(3))
        half.sendall(head[:40])
        drip.sendall(head + b"\r\n")
        began = time.monotonic()
        drip.settimeout(0.5)
        while True:
            with suppress(TimeoutError):
                drip.sendall(b"x")
                if not (said := drip.recv(1000)) or b"408" in said:
                    break
            assert time.monotonic() - began < 20
        for waiting in (silent, half):
            waiting.settimeout(20)
            assert waiting.recv(1000) == b""


def test_thousands_of_connections_keep_nobody_out(door: Door, node: NodeFile, gate: int) -> None:
    """2500 connections of another address and 300 of the node's own that say nothing: the node gets through."""
    with ExitStack() as always:
        for source, many in (("127.0.0.2", 2500), ("127.0.0.1", 300)):
            for _ in range(many):
                plain = always.enter_context(socket.socket())
                plain.bind((source, 0))
                plain.setblocking(False)
                with suppress(BlockingIOError):
                    plain.connect(door.host)
        began = time.monotonic()
        with node_client(door, node.key) as (client, number):
            client.PullMessages(PullMessagesRequest(node=Node(node_id=number)))
        assert time.monotonic() - began < 20
        assert psutil.Process(gate).num_fds() < 1500


@pytest.mark.fuzz
def test_garbage(door: Door, gate: int) -> None:
    """In place of TLS, of HTTP, and of a head that begins well."""
    rng = random.Random(0)
    for number in range(60):
        noise = rng.randbytes(rng.randrange(1, 40_000))
        start = rng.choice([b"", b"POST /v1/fleet/pull-messages HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"])
        with suppress(OSError):
            if number % 3 == 0:
                with socket.create_connection(door.host, timeout=20) as plain:
                    plain.sendall(noise)
                    plain.shutdown(socket.SHUT_WR)
                    assert b"HTTP/1.1 2" not in plain.recv(10_000)
            else:
                with door.connect() as secure:
                    secure.sendall(start + noise + b"\r\n\r\n")
                    assert b"HTTP/1.1 2" not in secure.recv(10_000)


def test_old_tls_is_refused(door: Door, gate: int) -> None:
    context = ssl.create_default_context(cafile=door.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, OSError)), socket.create_connection(door.host, timeout=20) as plain:
        context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_a_renewed_certificate_is_read_while_nodes_are_connected(door: Door, node: NodeFile, gate: int) -> None:
    def serial() -> str:
        with door.connect() as secure:
            return str((secure.getpeercert() or {})["serialNumber"])

    before = serial()
    with node_client(door, node.key) as (client, number):
        assert renew_certificate(door.folder / CERTIFICATES)
        wait_for(lambda: serial() != before, 60)
        client.PullMessages(PullMessagesRequest(node=Node(node_id=number)))


def test_a_removed_key_is_out_at_once_and_for_good(door: Door, gate: int) -> None:
    gone = door.add("gone")
    body = ActivateNodeRequest(public_key=b"x", heartbeat_interval=30).SerializeToString()
    with node_client(door, gone.key) as (client, number):
        request = PullMessagesRequest(node=Node(node_id=number))
        client.PullMessages(request)
        assert main(["fleet", "remove", "gone", "--fleet", str(door.folder)]) == 0
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            client.PullMessages(request)
        assert door.post(SMALL_ROUTES[0], body, key=gone.key).status_code == 401
        door.wait_for_line("removed node gone")
        with open_control(open_project(door.folder)) as control:
            (status,) = (n.status for n in control.ListNodes(ListNodesRequest()).nodes_info if n.node_id == number)
        assert status == "unregistered"


def test_a_killed_gate_and_a_killed_superlink_are_started_again(door: Door, node: NodeFile) -> None:
    for name, word in (("gate", "fedhen.fleet.gate_process"), ("superlink", "flower-superlink")):
        children = psutil.Process(door.process.pid).children(recursive=True)
        (killed,) = (child for child in children if word in " ".join(child.cmdline()))
        killed.kill()
        door.wait_for_line(f"the {name} has ended (exit code -9); it is started again")

        def is_back() -> bool:
            with suppress(httpx.HTTPError), node_client(door, node.key):
                return True
            return False

        wait_for(is_back, 60)
