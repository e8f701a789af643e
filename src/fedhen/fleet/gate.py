"""The gate of a fleet: a TLS server on the public address that passes nodes' requests to the SuperLink on loopback.

It accepts connections itself, so that strangers are counted and dropped before TLS costs anything, and streams bodies
in both directions, so that it holds no more than a few chunks of each.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from fedhen.fleet.gate_connection import BROKEN, Connection, open_tls
from fedhen.fleet.gate_rules import Bucket, Rules
from fedhen.fleet.gate_upstream import Upstream

LOG_SECONDS = 60.0
ADDRESSES_KEPT = 10_000


@dataclass
class RefusalLog:
    """Logs what was refused: at once the first time, then as a count every minute, so that nobody can flood the log."""

    write: Callable[[str], None]
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    since: float = field(default_factory=time.monotonic)

    def note(self, who: str, reason: str) -> None:
        if time.monotonic() - self.since > LOG_SECONDS:
            for (address, why), count in self.counts.most_common(20):
                if count > 1:
                    self.write(f"refused {address}: {why} ({count} times)")
            self.counts.clear()
            self.since = time.monotonic()
        if len(self.counts) < ADDRESSES_KEPT:
            self.counts[who, reason] += 1
            if self.counts[who, reason] == 1:
                self.write(f"refused {who}: {reason}")


class Gate:
    """The server: accepts connections and limits those that are not yet known to be a node's."""

    def __init__(self, rules: Rules, tls: ssl.SSLContext, upstream: Upstream, log: Callable[[str], None]) -> None:
        self.rules, self.limits, self.tls, self.upstream = rules, rules.limits, tls, upstream
        self.refusals = RefusalLog(log)
        self.tasks: set[asyncio.Task[None]] = set()
        self.strangers: dict[asyncio.Task[None], str] = {}
        """Connections that have not yet made a node's request -> their address, the oldest first."""
        self.arrivals: dict[str, Bucket] = {}

    async def run(self, listener: socket.socket) -> None:
        """Serves until it is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        try:
            while True:
                try:
                    connection, peer = await loop.sock_accept(listener)
                except OSError:
                    # Out of file descriptors, or the other side is gone already.
                    await asyncio.sleep(0.1)
                    continue
                address = shorten_address(str(peer[0]))
                task = asyncio.create_task(self.serve(connection, address))
                self.tasks.add(task)
                self.strangers[task] = address
                task.add_done_callback(self.forget)
                self.drop_oldest(address)
        finally:
            for task in list(self.tasks):
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

    def forget(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.strangers.pop(task, None)

    def drop_oldest(self, address: str) -> None:
        """Drops the oldest stranger if there are too many, of this address or in all: who is a node soon shows it."""
        same = [task for task, where in self.strangers.items() if where == address]
        if len(same) > self.limits.strangers_per_address:
            same[0].cancel()
            self.strangers.pop(same[0], None)
        elif len(self.strangers) > self.limits.strangers:
            oldest = next(iter(self.strangers))
            oldest.cancel()
            self.strangers.pop(oldest, None)

    async def serve(self, connection: socket.socket, address: str) -> None:
        """Serves one connection to its end."""
        try:
            await asyncio.sleep(self.find_arrivals(address).take())
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with open_tls(connection, self.tls, self.limits.head_seconds) as (reader, writer):
                await Connection(self, reader, writer, address).run()
        except BROKEN:
            pass
        finally:
            connection.close()

    def find_arrivals(self, address: str) -> Bucket:
        if len(self.arrivals) > ADDRESSES_KEPT:
            self.arrivals.clear()
        limits = self.limits
        return self.arrivals.setdefault(address, Bucket(limits.new_connections_per_second, limits.connection_burst))


def shorten_address(address: str) -> str:
    """Returns what counts as one address: of IPv6 the first half, since one machine has the whole rest."""
    if address.startswith("::ffff:"):
        return address.removeprefix("::ffff:")
    return ":".join(address.split(":")[:4]) if ":" in address else address


def make_tls(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


def listen(host: str, port: int) -> socket.socket:
    """Opens the public port. An empty host stands for all addresses of this machine, of IPv4 and IPv6."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def raise_file_limit() -> None:
    """Lets the process have as many connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def print_line(message: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", file=sys.stderr, flush=True)
