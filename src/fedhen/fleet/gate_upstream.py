"""The gate's connections to the SuperLink."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

import httpx

from fedhen.fleet.gate_rules import OBJECT_ROUTES, Limits

CONNECTIONS_OF_CLIENT = 8
"""httpx looks at all connections of a client for each request: hundreds would take most of the gate's time."""
IDLE_SECONDS = 4.0
"""The SuperLink closes a connection that was not used for 5 seconds, and a request that meets this is lost."""
QUEUE_SECONDS = 30.0
"""A request that finds no connection until then is to be repeated."""


class Upstream:
    """Several clients with a few connections each, which verify the SuperLink's certificate."""

    def __init__(self, address: str, ca: str, limits: Limits) -> None:
        trusted = ssl.create_default_context(cafile=ca)
        number = -(-limits.upstream_connections // CONNECTIONS_OF_CLIENT)
        self.clients = [make_client(address, trusted, limits) for _ in range(number)]
        self.busy = [0] * number
        """The number of requests that each client is sending."""
        self.free = asyncio.Semaphore(limits.upstream_connections)
        self.free_for_objects = asyncio.Semaphore(max(1, limits.upstream_connections * 3 // 4))
        """Of these, those that slow transfers of objects may hold: heartbeats always find others."""
        self.open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Upstream:
        for client in self.clients:
            await self.open.enter_async_context(client)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.open.aclose()

    @contextlib.asynccontextmanager
    async def send(
        self, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes | AsyncIterator[bytes]
    ) -> AsyncIterator[httpx.Response]:
        """Sends a request. Yields the response, whose body is not read yet. Raises an httpx.HTTPError."""
        async with self.wait_for_place(path in OBJECT_ROUTES):
            # The first that is free, so that few connections are used often and stay open.
            place = next(place for place, number in enumerate(self.busy) if number < CONNECTIONS_OF_CLIENT)
            client = self.clients[place]
            self.busy[place] += 1
            try:
                request = client.build_request("POST", path, headers=headers, content=body)
                response = await client.send(request, stream=True)
                try:
                    yield response
                finally:
                    await response.aclose()
            finally:
                self.busy[place] -= 1

    @contextlib.asynccontextmanager
    async def wait_for_place(self, is_object: bool) -> AsyncIterator[None]:
        """Waits until a connection is free, in the order of arrival. The clients' own queues are never used."""
        async with contextlib.AsyncExitStack() as places:
            try:
                async with asyncio.timeout(QUEUE_SECONDS):
                    for each in [self.free_for_objects] * is_object + [self.free]:
                        await places.enter_async_context(each)
            except TimeoutError:
                raise httpx.PoolTimeout("all connections to the SuperLink are in use") from None
            yield


def make_client(address: str, trusted: ssl.SSLContext, limits: Limits) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"https://{address}",
        verify=trusted,
        timeout=httpx.Timeout(limits.upstream_seconds, connect=5.0),
        # Under load all are kept: new ones would cost more than the requests.
        limits=httpx.Limits(
            max_connections=CONNECTIONS_OF_CLIENT,
            max_keepalive_connections=CONNECTIONS_OF_CLIENT,
            keepalive_expiry=IDLE_SECONDS,
        ),
        trust_env=False,
    )
