"""The gate's connections to the SuperLink."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

import httpx

from fedhen.fleet.gate_rules import Limits

CONNECTIONS_OF_CLIENT = 8
"""httpx looks at all connections of a client for each request: hundreds would take most of the gate's time."""
IDLE_SECONDS = 4.0
"""The SuperLink closes a connection that was not used for 5 seconds, and a request that meets this is lost."""


class Upstream:
    """Several clients with a few connections each, which verify the SuperLink's certificate."""

    def __init__(self, address: str, ca: str, limits: Limits) -> None:
        trusted = ssl.create_default_context(cafile=ca)
        number = max(1, limits.upstream_connections // CONNECTIONS_OF_CLIENT)
        self.clients = [make_client(address, trusted, limits) for _ in range(number)]
        self.busy = [0] * number
        """The number of requests that each client is sending."""
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
        # The first that is free, so that few connections are used often and stay open.
        places = range(len(self.clients))
        free = (place for place in places if self.busy[place] < CONNECTIONS_OF_CLIENT)
        place = next(free, min(places, key=self.busy.__getitem__))
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


def make_client(address: str, trusted: ssl.SSLContext, limits: Limits) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"https://{address}",
        verify=trusted,
        timeout=httpx.Timeout(limits.upstream_seconds, connect=5.0, pool=30.0),
        # Under load all are kept: new ones would cost more than the requests.
        limits=httpx.Limits(
            max_connections=min(CONNECTIONS_OF_CLIENT, limits.upstream_connections),
            max_keepalive_connections=CONNECTIONS_OF_CLIENT,
            keepalive_expiry=IDLE_SECONDS,
        ),
        trust_env=False,
    )
