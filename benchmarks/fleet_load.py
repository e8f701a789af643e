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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import httpx
import psutil
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from google.protobuf.message import Message as Protobuf

from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.config.toml import read_toml
from fedhen.fileio.atomic import write_json
from fedhen.fleet import wire_format
from fedhen.fleet.certificates import CA, make_node_key
from fedhen.fleet.enrolment import ENROLLED, EnrolledNode
from fedhen.fleet.follow import follow
from fedhen.fleet.new_project import create_project
from fedhen.fleet.node import choose_pause
from fedhen.fleet.processes import Processes, free_port
from fedhen.fleet.project import CERTIFICATES, FleetProject
from fedhen.fleet.run_lines import name_devices, read_errors
from fedhen.fleet.serve_settings import SERVE
from fedhen.fleet.superlink import SuperLinkClient
from fedhen.fleet.wire_format import Identity

HEARTBEAT_SECONDS, AWAY_SECONDS = 20.0, 5.0
LIMITS = """
[limits]
new_connections_per_second = 1000
connection_burst = 4000
strangers_per_address = 4000
strangers = 4000
"""
"""All nodes have one address here."""
PARTS = {"gate": "fedhen.fleet.gate_process", "SuperLink": "flower-superlink", "server": "flwr-serverapp"}
R = TypeVar("R", bound=Protobuf)


@dataclass
class LightNode:
    """A node without a model."""

    number: int
    tier: str
    key: ec.EllipticCurvePrivateKey
    http: httpx.AsyncClient
    tally: Counter[str]
    answered: set[tuple[int, str]]
    """Round and name of the node of each answer that was sent."""
    node: Node = field(default_factory=Node)
    is_away: bool = False

    def __post_init__(self) -> None:
        self.sender = NodeAuthHttpInterceptor(self.key, self.key.public_key())
        self.random = Random(self.number)

    async def call(self, path: str, request: Protobuf, kind: type[R]) -> R:
        """Sends a signed request, again and again while the server is busy."""
        pause = 1.0
        while True:
            built = self.http.build_request(
                "POST",
                f"/v1/fleet/{path}",
                content=request.SerializeToString(),
                headers={"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE},
            )
            self.sender.intercept(ProtobufRequestContext("", request, built), lambda _: httpx.Response(200))
            self.tally["requests"] += 1
            try:
                response = await self.http.send(built)
                response.raise_for_status()
                answer: R = kind()
                answer.ParseFromString(response.content)
                return answer
            except httpx.HTTPError as error:
                status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
                if status in (401, 403, 412, 413):
                    raise
                self.tally[f"repeated: {status or type(error).__name__}"] += 1
                await asyncio.sleep(pause * self.random.uniform(0.5, 1.0))
                pause = min(2 * pause, 30.0)

    async def connect(self) -> None:
        request = fleet_pb2.ActivateNodeRequest(
            public_key=public_key_to_bytes(self.key.public_key()), heartbeat_interval=30
        )
        self.node.node_id = (await self.call("activate-node", request, fleet_pb2.ActivateNodeResponse)).node_id

    async def beat(self) -> None:
        """Says now and then that the node is there, also while it is busy, as a thread of real nodes does."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS * self.random.uniform(0.8, 1.0))
            if self.is_away:
                continue
            beat = heartbeat_pb2.SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=30)
            await self.call("send-node-heartbeat", beat, heartbeat_pb2.SendNodeHeartbeatResponse)

    async def live(self) -> None:
        """Looks for messages until it is cancelled."""
        await asyncio.sleep(self.random.uniform(0, 10))
        await self.connect()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.beat())
            await self.work()

    async def work(self) -> None:
        """Answers messages."""
        last = time.monotonic()
        while True:
            looked = time.monotonic()
            pull = fleet_pb2.PullMessagesRequest(node=self.node)
            found = await self.call("pull-messages", pull, fleet_pb2.PullMessagesResponse)
            if found.messages_list:
                run = found.messages_list[0].metadata.run_id
                try:
                    await self.answer(await self.receive(run, found.message_object_trees[0]))
                except httpx.HTTPStatusError as error:
                    self.tally[f"given up: {error.response.status_code}"] += 1
                last = looked = time.monotonic()
            await asyncio.sleep(choose_pause(time.monotonic() - last, time.monotonic() - looked))

    async def receive(self, run: int, tree: message_pb2.ObjectTree) -> Message:
        parts = {}
        for part in iterate_object_tree(tree):
            while part.object_id not in parts:
                request = message_pb2.PullObjectRequest(node=self.node, run_id=run, object_id=part.object_id)
                found = await self.call("pull-object", request, message_pb2.PullObjectResponse)
                if found.object_available:
                    parts[part.object_id] = found.object_content
                else:
                    await asyncio.sleep(1)
        confirm = message_pb2.ConfirmMessageReceivedRequest(
            node=self.node, run_id=run, message_object_id=tree.object_id
        )
        await self.call("confirm-message-received", confirm, message_pb2.ConfirmMessageReceivedResponse)
        message = inflate_object_from_contents(tree.object_id, parts)
        assert isinstance(message, Message)
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    async def answer(self, message: Message) -> None:
        """Answers a message, or vanishes for a while."""
        round_number = message.metadata.group_id
        if not round_number:
            who = Identity(self.tier, 100, f"light-{self.number}", self.number)
            await self.push(Message(wire_format.pack_identity(who), reply_to=message))
        elif (int(round_number) + self.number) % 3 == 0:
            self.tally[f"vanished in round {round_number}"] += 1
            gone, self.is_away = fleet_pb2.DeactivateNodeRequest(node_id=self.node.node_id), True
            await self.call("deactivate-node", gone, fleet_pb2.DeactivateNodeResponse)
            await asyncio.sleep(AWAY_SECONDS)
            await self.connect()
            self.is_away = False
            # As a node that was restarted.
            await self.push(Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "it had vanished"), reply_to=message))
        else:
            model = message.content["model"]
            assert isinstance(model, ArrayRecord)
            update = wire_format.pack_answer(wire_format.Answer({}, {}, 1.0, ()))["update"]
            await self.push(Message(RecordDict({"update": update, "model": model}), reply_to=message))
            self.tally[f"answered in round {round_number}"] += 1
            self.answered.add((int(round_number), f"light-{self.number}"))

    async def push(self, answer: Message) -> None:
        answer.metadata.__dict__["_message_id"] = answer.object_id
        request = fleet_pb2.PushMessagesRequest(
            node=self.node,
            messages_list=[message_to_proto(remove_content_from_message(answer))],
            message_object_trees=[get_object_tree(answer)],
            clientapp_runtime_list=[0.0],
        )
        found = await self.call("push-messages", request, fleet_pb2.PushMessagesResponse)
        for number, part in get_all_nested_objects(answer).items():
            if number in found.objects_to_push:
                pushed = message_pb2.PushObjectRequest(
                    node=self.node,
                    run_id=answer.metadata.run_id,
                    object_id=number,
                    object_content=part.deflate(),
                    session_id=found.session_id,
                )
                await self.call("push-object", pushed, message_pb2.PushObjectResponse)


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
