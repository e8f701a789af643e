"""Plays many light nodes against a real gate, SuperLink and server: seconds a round, processor time and peak memory.

python benchmarks/fleet_load.py [NODES] [ACTIVE] [ROUNDS]

The nodes live in this process. They speak Flower's node protocol over HTTP and TLS, sign every request, and look for
messages as real nodes do, but they do not train: they answer with the weights that they were sent. In each round a
third of the active ones vanish without an answer, come back later and say so, as restarted nodes do. Every answer that
was sent must be merged.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from light_node import LightNode

from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.config.toml import read_toml
from fedhen.fileio.atomic import write_json
from fedhen.fleet.certificates import CA, make_node_key
from fedhen.fleet.enrolment import ENROLLED, EnrolledNode
from fedhen.fleet.follow import follow
from fedhen.fleet.new_project import create_project
from fedhen.fleet.processes import Processes, free_port
from fedhen.fleet.project import CERTIFICATES, FleetProject
from fedhen.fleet.run_lines import name_devices, read_errors
from fedhen.fleet.serve_settings import SERVE
from fedhen.fleet.superlink import SuperLinkClient

LIMITS = """
[limits]
new_connections_per_second = 1000
connection_burst = 4000
strangers_per_address = 4000
strangers = 4000
"""
"""All nodes have one address here."""
PARTS = {"gate": "fedhen.fleet.gate_process", "SuperLink": "flower-superlink", "server": "flwr-serverapp"}


async def play_nodes(
    project: FleetProject,
    keys: list[str],
    tally: Counter[str],
    answered: set[tuple[int, str]],
    over: threading.Event,
) -> None:
    tls = ssl.create_default_context(cafile=str(project.path / CERTIFICATES / CA))
    address = f"https://{project.public}"
    lives = []
    for number, text in enumerate(keys):
        key = load_ssh_private_key(text.encode(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        http = httpx.AsyncClient(base_url=address, verify=tls, timeout=60, trust_env=False)
        tier = "simple" if number < len(keys) // 2 else "complex"
        lives.append(asyncio.create_task(LightNode(number, tier, key, http, tally, answered).live()))
    while not over.is_set():
        await asyncio.sleep(0.2)
        for life in lives:
            if life.done():
                tally[f"ended: {life.exception()}"] += 1
        lives = [life for life in lives if not life.done()]
    for life in lives:
        life.cancel()
    await asyncio.gather(*lives, return_exceptions=True)


def prepare(place: Path, number: int, active: int, rounds: int) -> tuple[FleetProject, list[str], Config]:
    """Writes a fleet with its enrolled nodes. Returns their private keys."""
    project = FleetProject(place / "fleet", f"127.0.0.1:{free_port()}", public=f"127.0.0.1:{free_port()}")
    create_project(project, load_recipe("digits"), {"simple": 1, "complex": 1})
    with (project.path / SERVE).open("a") as file:
        file.write(LIMITS)
    keys = [make_node_key() for _ in range(number)]
    nodes = [EnrolledNode(f"light-{k}", "simple", public) for k, (_, public) in enumerate(keys)]
    write_json(project.path / ENROLLED, {"nodes": [asdict(node) for node in nodes]})
    config = read_toml(project.path / "config.toml")
    devices = replace(config.devices, number=number, active=active, tiers=())
    fleet = replace(config.fleet, deadline_seconds=240.0, wait_seconds=900.0)
    scoring = replace(config.evaluation, every=rounds, devices=False)
    return (
        project,
        [key for key, _ in keys],
        replace(config, rounds=rounds, devices=devices, fleet=fleet, evaluation=scoring),
    )


@contextmanager
def watch(peaks: dict[str, int], seconds: dict[str, float]) -> Iterator[None]:
    """Notes the largest memory and the processor time of each part of the server, as the system has counted them."""
    over, ours = threading.Event(), psutil.Process()

    def look() -> None:
        while not over.wait(0.5):
            for process in ours.children(recursive=True):
                try:
                    line, used = " ".join(process.cmdline()), process.cpu_times()
                    status = Path(f"/proc/{process.pid}/status").read_text()
                except (psutil.Error, OSError):
                    continue
                for part, word in PARTS.items():
                    if word in line and "VmHWM" in status:
                        peak = int(status.partition("VmHWM:")[2].split()[0]) // 1024
                        peaks[part] = max(peaks.get(part, 0), peak)
                        seconds[part] = max(seconds.get(part, 0.0), round(used.user + used.system, 1))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> None:
    given = sys.argv[1:]
    number, active, rounds = (int(value) for value in [*given, *("500", "100", "5")[len(given) :]])
    tally: Counter[str] = Counter()
    answered: set[tuple[int, str]] = set()
    peaks: dict[str, int] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, watch(peaks, seconds):
        project, keys, config = prepare(Path(folder), number, active, rounds)
        began, over = time.monotonic(), threading.Event()
        first = True
        playing = threading.Thread(target=lambda: asyncio.run(play_nodes(project, keys, tally, answered, over)))
        serve = [sys.executable, "-m", "fedhen", "fleet", "serve", str(project.path)]
        with subprocess.Popen(serve, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            try:
                while "nodes connect to" not in (said := server.stderr.readline()):
                    assert said, "the server has ended"
                threading.Thread(target=server.stderr.read, daemon=True).start()
                print(f"{number} nodes registered after {time.monotonic() - began:.0f} s", flush=True)
                playing.start()
                superlink, run = SuperLinkClient(project, Processes(project.path / "logs")), Path(folder) / "run"
                began = time.monotonic()
                for record, timing in follow(superlink, superlink.start(config, run), run, 0, rounds):
                    if first:
                        print(f"first round done after {time.monotonic() - began:.0f} s", flush=True)
                    first = False
                    print(describe(record, timing, tally, answered, run), flush=True)
            finally:
                over.set()
                playing.join()
                server.terminate()
                server.wait(60)
    found = {"peak memory in MiB": peaks, "processor seconds": seconds}
    print(json.dumps({**found, **{k: v for k, v in sorted(tally.items()) if "round" not in k}}))


def describe(
    record: dict[str, Any], timing: dict[str, Any], tally: Counter[str], answered: set[tuple[int, str]], run: Path
) -> str:
    """Returns a line about a round, and one with the reason for each answer that was sent but not merged."""
    number, names = record["round"], name_devices(run)
    reasons = {names[error.device]: error.error for error in read_errors(run) if error.round == number}
    reasons |= {names[device]: "it was late" for device in record.get("late", ())}
    out = {*record["dropped"], *record.get("failed", ()), *record.get("late", ())}
    merged = {names[device] for device in {*record["active"]} - out}
    sent = {name for round_number, name in answered if round_number == number}
    line = (
        f"round {number}: {timing['total']:.1f} s, {len(record['active'])} active, "
        f"{tally[f'vanished in round {number}']} vanished, {len(sent)} answered, {len(merged)} merged, "
        f"{len(sent - merged)} lost"
    )
    return "\n".join([line, *(f"  {name}: {reasons.get(name)}" for name in sorted(sent - merged))])


if __name__ == "__main__":
    main()
