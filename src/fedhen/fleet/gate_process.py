"""The process of the gate: `python -m fedhen.fleet.gate_process DIR`. `fedhen fleet serve` starts it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

from fedhen.errors import FedhenError
from fedhen.fleet.certificates import CA, SERVER, SERVER_KEY
from fedhen.fleet.enrolment import Enrolment
from fedhen.fleet.gate import Gate, listen, make_tls, print_line, raise_file_limit
from fedhen.fleet.gate_rules import Rules, read_limits
from fedhen.fleet.gate_upstream import Upstream
from fedhen.fleet.project import CERTIFICATES, open_project
from fedhen.fleet.serve_settings import read_serve_settings, split_address

LISTENING = "the gate listens on"
CERTIFICATE_SECONDS = 2.0


async def follow_certificate(gate: Gate, paths: tuple[Path, Path]) -> None:
    """Reads the certificate and its key again when they have changed. Connections that are open stay open."""
    read = [path.stat() for path in paths]
    while True:
        await asyncio.sleep(CERTIFICATE_SECONDS)
        # One of the two may not be written yet.
        with contextlib.suppress(OSError):
            found = [path.stat() for path in paths]
            if [(s.st_mtime_ns, s.st_ino) for s in found] != [(s.st_mtime_ns, s.st_ino) for s in read]:
                gate.tls = make_tls(*map(str, paths))
                read = found
                print_line("the gate has read a new certificate")


async def run_gate(folder: Path) -> None:
    """Runs the gate of a fleet's folder until it is terminated."""
    project, settings = open_project(folder), read_serve_settings(folder)
    assert settings is not None
    rules = Rules(Enrolment(folder), read_limits(settings.limits))
    public = folder / CERTIFICATES
    paths = (public / SERVER, public / SERVER_KEY)
    tls = make_tls(*map(str, paths))
    host, port = split_address(settings.listen, "listen", empty_host=True)
    raise_file_limit()
    with listen(host, port) as listener:
        print_line(f"{LISTENING} {settings.listen}")
        async with Upstream(settings.superlink, str(project.certificates / CA), rules.limits) as upstream:
            gate = Gate(rules, tls, upstream, print_line)
            task = asyncio.create_task(gate.run(listener))
            following = asyncio.create_task(follow_certificate(gate, paths))
            loop = asyncio.get_running_loop()
            # Garbage instead of TLS is no news.
            loop.set_exception_handler(lambda loop, context: None)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, task.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await task
            following.cancel()


def main() -> int:
    try:
        asyncio.run(run_gate(Path(sys.argv[1])))
    except (FedhenError, OSError) as error:
        print_line(f"fedhen: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
