"""The gate's connections to the SuperLink: who waits, in which order, and what is left for heartbeats."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from fedhen.errors import FleetError
from fedhen.fleet import gate_upstream
from fedhen.fleet.certificates import CA, write_certificates
from fedhen.fleet.gate_rules import Limits, read_limits
from fedhen.fleet.gate_upstream import CONNECTIONS_OF_CLIENT, Upstream

pytestmark = pytest.mark.fleet


@pytest.fixture
def ca(tmp_path: Path) -> str:
    write_certificates(tmp_path, ["127.0.0.1"])
    return str(tmp_path / CA)


@pytest.mark.parametrize("connections", [1, 5, 8, 12, 256])
def test_there_are_as_many_connections_as_are_set(ca: str, connections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_upstream, "QUEUE_SECONDS", 0.05)
    upstream = Upstream("127.0.0.1:1", ca, Limits(upstream_connections=connections))
    assert (len(upstream.clients) - 1) * CONNECTIONS_OF_CLIENT < connections <= len(upstream.clients) * 8

    async def take_all() -> None:
        async with AsyncExitStack() as held:
            for _ in range(connections):
                await held.enter_async_context(upstream.wait_for_place(False))
            with pytest.raises(httpx.PoolTimeout):
                await held.enter_async_context(upstream.wait_for_place(False))
        # All are free again.
        async with AsyncExitStack() as held:
            for _ in range(connections):
                await held.enter_async_context(upstream.wait_for_place(False))

    asyncio.run(take_all())


def test_transfers_of_objects_leave_connections_for_heartbeats(ca: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_upstream, "QUEUE_SECONDS", 0.05)
    upstream = Upstream("127.0.0.1:1", ca, Limits(upstream_connections=16))

    async def take() -> None:
        async with AsyncExitStack() as held:
            for _ in range(12):
                await held.enter_async_context(upstream.wait_for_place(True))
            with pytest.raises(httpx.PoolTimeout):
                await held.enter_async_context(upstream.wait_for_place(True))
            for _ in range(4):
                await held.enter_async_context(upstream.wait_for_place(False))

    asyncio.run(take())


def test_requests_wait_in_the_order_of_their_arrival(ca: str) -> None:
    """Nobody who came later takes what has become free, whichever client it is of."""
    upstream, served = Upstream("127.0.0.1:1", ca, Limits(upstream_connections=16)), list[int]()

    async def serve(number: int) -> None:
        async with upstream.wait_for_place(False):
            served.append(number)
            await asyncio.sleep(0)

    async def crowd() -> None:
        async with AsyncExitStack() as held:
            for _ in range(16):
                await held.enter_async_context(upstream.wait_for_place(False))
            waiting = [asyncio.create_task(serve(number)) for number in range(40)]
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)

    asyncio.run(crowd())
    assert served == list(range(40))


@pytest.mark.parametrize("value", [0, -1, 0.5, True, "many"])
def test_limits_must_leave_something(value: object) -> None:
    with pytest.raises(FleetError, match=r"limits\.upstream_connections must be a number above 0"):
        read_limits({"upstream_connections": value})
