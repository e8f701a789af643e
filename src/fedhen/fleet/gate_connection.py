"""One connection to the gate: TLS, HTTP, and the passing of requests and responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import h11
import httpx

from fedhen.fleet.gate_rules import PASSED_HEADERS, PUSH_MESSAGES, Limits, NodeState, Refused

if TYPE_CHECKING:
    from fedhen.fleet.gate import Gate

CHUNK = 2**16
LONGEST_HEAD = 2**14
BROKEN = (OSError, ssl.SSLError, h11.ProtocolError, asyncio.IncompleteReadError, TimeoutError, EOFError)
"""What a connection may end with at any time."""
STATUS_OF_LOST_SUPERLINK = ((httpx.PoolTimeout, 503), (httpx.TimeoutException, 504), (httpx.TransportError, 502))
"""Flower's nodes try again after these."""


@contextlib.asynccontextmanager
async def open_tls(
    connection: socket.socket, tls: ssl.SSLContext, seconds: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Opens TLS on an accepted connection. Closes it at once at the end, without waiting for the other side."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=CHUNK)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=1.0
    )
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    try:
        yield reader, writer
        # Sends what is buffered. A side that does not read has no more than this time.
        async with asyncio.timeout(seconds):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    finally:
        transport.abort()


class Connection:
    """One connection of a node: passes its requests one by one."""

    def __init__(self, gate: Gate, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        self.gate, self.reader, self.writer, self.address = gate, reader, writer, address
        self.limits: Limits = gate.limits
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=LONGEST_HEAD)
        self.node: NodeState | None = None

    async def run(self) -> None:
        try:
            while await self.pass_request():
                self.http.start_next_cycle()
        except Refused as refused:
            self.gate.refusals.note(self.node.name if self.node else self.address, refused.reason)
            await self.refuse(refused)
        except h11.RemoteProtocolError:
            self.gate.refusals.note(self.address, "it does not speak HTTP")
            await self.refuse(Refused(400, "not HTTP"))
        finally:
            if self.node is not None:
                self.node.connections -= 1

    async def pass_request(self) -> bool:
        """Passes one request. Returns whether another one may follow on this connection."""
        async with asyncio.timeout(self.limits.idle_seconds if self.node else self.limits.head_seconds):
            head = await self.next_event()
        if not isinstance(head, h11.Request):
            return False
        path, node, length = self.gate.rules.check_request(head.method, head.target, dict(head.headers))
        self.admit(node)
        await asyncio.sleep(node.bucket.take())
        if self.http.they_are_waiting_for_100_continue:
            await self.send(h11.InformationalResponse(status_code=100, headers=[]))
        body: bytes | AsyncIterator[bytes] = self.read_body()
        if length <= self.limits.message_bytes:
            body = b"".join([chunk async for chunk in self.read_body()])
        if path == PUSH_MESSAGES:
            assert isinstance(body, bytes)
            self.gate.rules.check_answer(node, body)
        headers = [
            *((name, value) for name, value in head.headers if is_passed(name)),
            (b"accept-encoding", b"identity"),
        ]
        try:
            async with self.gate.upstream.send(path, headers, body) as response:
                await self.send_response(response)
        except httpx.HTTPError as error:
            status = next((number for kind, number in STATUS_OF_LOST_SUPERLINK if isinstance(error, kind)), 502)
            raise Refused(status, "the SuperLink does not answer") from None
        return self.http.our_state is h11.DONE and self.http.their_state is h11.DONE

    def admit(self, node: NodeState) -> None:
        """Counts the connection as this node's after its first request. A connection is of one node."""
        if self.node is node:
            return
        if self.node is not None:
            # Also if the node was removed and enrolled again meanwhile.
            raise Refused(401, "the connection is another node's")
        if node.connections >= self.limits.connections_per_node:
            raise Refused(503, "it has too many connections")
        node.connections += 1
        self.node = node
        task = asyncio.current_task()
        assert task is not None
        self.gate.strangers.pop(task, None)

    async def next_event(self) -> h11.Event | None:
        """Returns the next part of a request, or None if a response has to be sent before."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.reader.read(CHUNK))
        return event if isinstance(event, h11.Event) else None

    async def read_body(self) -> AsyncIterator[bytes]:
        """Yields the body. Its sender must not be slower than the limit for long."""
        began, received = time.monotonic(), 0
        while True:
            async with self.keep_pace(began, received):
                event = await self.next_event()
            if isinstance(event, h11.EndOfMessage):
                return
            if not isinstance(event, h11.Data):
                raise EOFError
            received += len(event.data)
            yield bytes(event.data)

    @contextlib.asynccontextmanager
    async def keep_pace(self, began: float, done: int) -> AsyncIterator[None]:
        """Ends the connection if the other side is slower than `bytes_per_second`, after a grace period."""
        end = began + self.limits.grace_seconds + done / self.limits.bytes_per_second
        try:
            async with asyncio.timeout(end - time.monotonic()):
                yield
        except TimeoutError:
            raise Refused(408, "it is too slow") from None

    async def send_response(self, response: httpx.Response) -> None:
        headers = [(name, value) for name, value in response.headers.raw if is_passed(name.lower())]
        await self.send(h11.Response(status_code=response.status_code, headers=headers))
        began, sent = time.monotonic(), 0
        try:
            async for chunk in response.aiter_raw(CHUNK):
                async with self.keep_pace(began, sent):
                    await self.send(h11.Data(data=chunk))
                sent += len(chunk)
        except httpx.HTTPError as error:
            # The head has been sent: the node sees that the body is cut off.
            raise EOFError from error
        except Refused as refused:
            self.gate.refusals.note(self.node.name if self.node else self.address, refused.reason)
            raise EOFError from refused
        await self.send(h11.EndOfMessage())

    async def refuse(self, refused: Refused) -> None:
        """Answers with an error and ends the connection."""
        if self.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = json.dumps({"detail": refused.reason}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        async with asyncio.timeout(self.limits.head_seconds):
            await self.send(h11.Response(status_code=refused.status, headers=headers))
            await self.send(h11.Data(data=body))
            await self.send(h11.EndOfMessage())

    async def send(self, event: h11.Event) -> None:
        self.writer.write(self.http.send(event) or b"")
        await self.writer.drain()


def is_passed(name: bytes) -> bool:
    return name in PASSED_HEADERS or name.startswith(b"flwr-")
