"""A storm: random SIGKILLs over the server, gate, SuperLink, ServerApp and nodes of a real fleet while it trains.

python benchmarks/fleet_storm.py [KILLS] [ROUNDS] [SEED] [SECONDS]

The fleet is on loopback, with TLS, keys and SCAFFOLD, and is run with the commands that `fedhen fleet init` prints. A
service that ends is started again after a moment, as its systemd unit does. A run that ends is resumed, as its operator
does with the printed command. Afterwards a simulation is played in which the same answers are missing: no complete
round may be lost or played again with another result, and records and models must be the same bytes. Without a
missing answer, that is the undisturbed run. After SECONDS the storm ends, and the rounds played so far are compared.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from fedhen.algorithm.methods import load_method
from fedhen.algorithm.rounds import Devices, Sent
from fedhen.algorithm.updates import Failure, Reply
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.data.storage import data_root
from fedhen.engines.engine import EngineParts, make_plain_engine
from fedhen.experiment.build import build_population, choose_data, start_experiment
from fedhen.experiment.runner import play_run
from fedhen.fleet.processes import find_marked, free_port
from fedhen.fleet.project import fit_to_nodes, node_names
from fedhen.runs.private import read_secret
from fedhen.runs.reader import read_run
from fedhen.runs.records import RoundRecord

NODES = {"simple": 2, "complex": 1}
SETTINGS = [
    *("local.name=scaffold", "training.epochs=1", "evaluation.devices=false", "runtime.engine=plain"),
    *("checkpoint.rounds=1", "fleet.wait_seconds=240", "fleet.deadline_seconds=120", "fleet.losses=true"),
    "targets={}",
]
VICTIMS = {
    "server": "fedhen fleet serve",
    "gate": "fedhen.fleet.gate_process",
    "SuperLink": "flower-superlink",
    "ServerApp": "flwr-serverapp",
    "node": "fedhen fleet node",
}
"""Kind of process -> what its command line has."""
VARIABLE = "FEDHEN_STORM"
PAUSE = 1.0
"""Seconds before what has ended is started again. The units that `fedhen fleet init` writes wait for 5."""
LONGEST_DELAY = 4.0
PATIENCE = 300.0


@dataclass
class Service:
    """A program that is started again when it fails."""

    name: str
    command: Callable[[], Sequence[str]]
    place: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    due: float = 0.0
    starts: int = 0

    def keep(self) -> None:
        if self.process is None or (self.process.poll() is not None and time.monotonic() > self.due > 0):
            with (self.place / f"{self.name}.log").open("ab") as log:
                self.process = subprocess.Popen(
                    self.command(), cwd=self.place, env=self.environment, stdout=log, stderr=log, start_new_session=True
                )
            self.due, self.starts = 0.0, self.starts + 1
        elif self.process.poll() not in (None, 0) and not self.due:
            self.due = time.monotonic() + PAUSE


@dataclass
class Storm:
    """A fleet under attack."""

    place: Path
    kills: int
    rounds: int
    rng: random.Random
    end: float
    """When to stop."""
    services: list[Service] = field(default_factory=list)
    seen: list[bytes] = field(default_factory=list)
    """The records of the rounds that were complete when somebody looked."""
    hits: list[tuple[str, float]] = field(default_factory=list)
    """What was killed, and when."""
    progress: list[float] = field(default_factory=list)
    """When each round was seen to be complete."""

    def __post_init__(self) -> None:
        self.mark, self.run = secrets.token_hex(8), self.place / "run"
        self.environment = {**os.environ, VARIABLE: self.mark}

    def play(self) -> None:
        """Plays the run to its end. Afterwards no process of it is left."""
        try:
            self.prepare()
            for number in range(self.kills):
                self.wait_for_round(number * max(1, self.rounds - 1) // self.kills)
                self.watch(self.rng.uniform(0, LONGEST_DELAY))
                self.kill(self.rng.choice(list(VICTIMS)))
            self.wait_for_round(self.rounds)
            while self.training.process is None or self.training.process.poll() != 0:
                self.watch(0.2)
        except TimeoutError:
            print(f"stopped after {len(self.seen)} rounds", flush=True)
        finally:
            self.stop()

    def prepare(self) -> None:
        """Starts the server and the nodes, and the training."""
        address = f"127.0.0.1:{free_port()}"
        many = [word for tier, number in NODES.items() for word in ("--nodes", f"{tier}={number}")]
        self.call("fleet", "init", "fleet", "--address", address, *many)
        settings = self.place / "fleet" / "config.toml"
        changed = [*SETTINGS, f"rounds={self.rounds}"]
        settings.write_text(toml.to_toml(toml.apply_settings(toml.read_toml(settings), changed)))
        self.add_service("server", lambda: self.command("fleet", "serve", "fleet")).keep()
        for name in node_names(NODES):
            tier, file = name.rpartition("-")[0], f"{name}.toml"
            self.call("fleet", "add", name, "--tier", tier, "--fleet", "fleet", "--out", file)
            node = ["fleet", "node", file, "--data", f"fleet/data/{name}.npz", "--state", f"state/{name}"]
            self.add_service(name, partial(self.command, *node))
        log = self.place / "server.log"
        while "nodes connect to" not in log.read_text():
            self.watch(0.2)
        self.training = self.add_service("training", self.train)

    def train(self) -> list[str]:
        """Returns the command that begins the training, or resumes it if there is something to resume."""
        if (self.run / "config.toml").is_file():
            return self.command("fleet", "run", "fleet", "--resume", self.run.name)
        if self.run.is_dir():
            self.run = self.run.with_name(f"{self.run.name}-again")
        return self.command("fleet", "run", "fleet", "--out", self.run.name)

    def call(self, *arguments: str) -> None:
        subprocess.run(self.command(*arguments), cwd=self.place, env=self.environment, check=True, capture_output=True)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "fedhen", *arguments]

    def add_service(self, name: str, command: Callable[[], Sequence[str]]) -> Service:
        self.services.append(Service(name, command, self.place, self.environment))
        return self.services[-1]

    def watch(self, seconds: float) -> None:
        """Does what services and the operator do for a while."""
        end = time.monotonic() + seconds
        while True:
            for service in self.services:
                service.keep()
            self.look()
            if time.monotonic() > self.end:
                raise TimeoutError
            if time.monotonic() >= end:
                return
            time.sleep(0.05)

    def look(self) -> None:
        """Checks that what was complete is still there, and unchanged."""
        if not (timing := self.run / "timing.jsonl").is_file():
            return
        complete = timing.read_bytes().count(b"\n")
        lines = (self.run / "rounds.jsonl").read_bytes().splitlines()[:complete]
        assert lines[: len(self.seen)] == self.seen, f"of {len(self.seen)} complete rounds, some are lost or changed"
        self.progress += [time.monotonic()] * (len(lines) - len(self.seen))
        self.seen = lines

    def wait_for_round(self, number: int) -> None:
        end = time.monotonic() + PATIENCE
        while len(self.seen) < number:
            assert time.monotonic() < end, f"round {number} is not played: see {self.place}"
            self.watch(0.05)

    def kill(self, kind: str) -> None:
        """Kills one process of a kind, as soon as there is one."""
        end = time.monotonic() + PATIENCE
        while not (found := list(self.find(kind))):
            assert time.monotonic() < end, f"no {kind} is started: see {self.place}"
            self.watch(0.05)
        victim = self.rng.choice(sorted(found, key=lambda process: process.pid))
        with suppress(psutil.Error):
            victim.kill()
            self.hits.append((kind, time.monotonic()))
            print(f"{len(self.hits):4} kills, {len(self.seen):3} rounds: {kind}", flush=True)

    def find(self, kind: str) -> Iterator[psutil.Process]:
        for process in find_marked(self.mark, VARIABLE):
            with suppress(psutil.Error):
                if VICTIMS[kind] in " ".join(process.cmdline()):
                    yield process

    def stop(self) -> None:
        """Ends all services, and makes sure that they have left no process."""
        for service in reversed(self.services):
            if service.process is not None:
                service.process.terminate()
        for service in self.services:
            if service.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    service.process.wait(60)
        left = [" ".join(process.cmdline()) for process in find_marked(self.mark, VARIABLE)]
        kill_marked_by(self.mark)
        assert not left, f"left behind: {left}"

    def describe(self) -> str:
        waits: dict[str, list[float]] = defaultdict(list)
        for kind, at in self.hits:
            waits[kind] += [when - at for when in self.progress if when > at][:1]
        return "\n".join(
            f"{kind:10} {len(found):3} kills; next round complete after {statistics.median(found):5.1f} s (median), "
            f"{max(found):5.1f} s (longest)"
            for kind, found in sorted(waits.items())
        )


def kill_marked_by(mark: str) -> None:
    for process in find_marked(mark, VARIABLE):
        with suppress(psutil.Error):
            process.kill()


@dataclass
class LosingDevices:
    """The devices of a simulation, of which in each round some do not answer."""

    inner: Devices
    records: Sequence[RoundRecord]

    def train(self, number: int, sent: Sent, active: Sequence[int]) -> Iterator[Reply]:
        record = self.records[number - 1]
        lost = {*record.failed, *record.late}
        yield from self.inner.train(number, sent, [device for device in active if device not in lost])
        for device in sorted(lost):
            yield Failure(device, "it did not answer in the storm", device in record.late)


def replay(config: Config, run: Path, folder: Path) -> Path:
    """Simulates a run with the same active devices, of which the same do not answer, from the same secret."""
    records = read_run(run).rounds
    data = choose_data(None, config.data, data_root(None), config.seed)

    def engine(start: EngineParts):  # type: ignore[no-untyped-def]
        plain = make_plain_engine(start)
        return replace(plain, devices=LosingDevices(plain.devices, records))

    population = build_population(config, load_method(config.method), data, secret=read_secret(run))
    active = [list(record.active) for record in records]
    experiment = start_experiment(population, activate=lambda number, _: active[number - 1], engine=engine)
    folder.mkdir()
    for _ in play_run(folder, experiment):
        pass
    return folder


def read_weights(run: Path) -> dict[str, bytes]:
    """Returns file name -> the bytes of its weights, without what the file says of the data."""
    found = {path.name: path.read_bytes() for path in (run / "models").iterdir()}
    return {name: content[8 + int.from_bytes(content[:8], "little") :] for name, content in found.items()}


def main(kills: int = 60, rounds: int = 30, seed: int = 0, limit: int = 10_000) -> int:
    """Plays a storm and compares. Returns 1 if a byte differs, else 0."""
    began = time.monotonic()
    # It is kept if something fails.
    storm = Storm(Path(tempfile.mkdtemp()), kills, rounds, random.Random(seed), began + limit)
    storm.play()
    seconds = time.monotonic() - began
    if not (storm.run / "summary.json").is_file():
        storm.call("finish", storm.run.name)
    records = read_run(storm.run).rounds
    config = fit_to_nodes(load_recipe("digits"), NODES)
    config = toml.apply_settings(config, [*SETTINGS, f"rounds={len(records)}"])
    there = replay(config, storm.run, storm.place / "simulation")
    same = (storm.run / "rounds.jsonl").read_bytes() == (there / "rounds.jsonl").read_bytes()
    same = same and read_weights(storm.run) == read_weights(there)
    parts = [path.name for path in storm.place.rglob("*.part")]
    if same:
        shutil.rmtree(storm.place)
    missing = [len({*range(sum(NODES.values()))} - ({*r.active} - {*r.failed} - {*r.late})) for r in records]
    print(storm.describe())
    print(
        f"{len(storm.hits)} kills, {len(records)} rounds in {seconds:.0f} s, {sum(missing)} answers missing in "
        f"{sum(map(bool, missing))} rounds, the run was started {storm.training.starts} times, left files: {parts}; "
        f"{'the same bytes as' if same else 'OTHER BYTES than'} a simulation without these answers"
    )
    return int(not same)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
