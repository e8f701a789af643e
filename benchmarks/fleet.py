"""Measures a fleet on this machine, in seconds per round and bytes per tier, and Flower alone with the same bytes.

python benchmarks/fleet.py [ROUNDS]

The fleet trains the paper's CIFAR-10 model (11 million weights) on very few random images, so that training hardly
counts. Then a bare Flower app without torch returns arrays of the same sizes unchanged, on Flower's own nodes.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.fleet.local_fleet import FAST_POLLING, LocalFleet
from fedhen.fleet.processes import free_port
from fedhen.fleet.project import NODES as NODES_FOLDER
from fedhen.fleet.project import fit_to_nodes

NODES = {"simple": 2, "complex": 2}
IMAGES = 8
"""Images of a device: one batch."""
BARE = """
import json, time
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

SIZES, ROUNDS, OUT = @SIZES@, @ROUNDS@, Path("@OUT@")
client = ClientApp()
server = ServerApp()

@client.train()
def train(message, context):
    return Message(message.content, reply_to=message)

@server.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < len(SIZES):
        time.sleep(0.5)
    nodes, seconds = sorted(grid.get_node_ids()), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        data = {n: np.frombuffer(np.random.default_rng().bytes(n), np.uint8) for n in set(SIZES)}
        packed = {n: RecordDict({"a": ArrayRecord({"w": Array(data[n])})}) for n in data}
        messages = [Message(packed[n], node, MessageType.TRAIN) for node, n in zip(nodes, SIZES)]
        waiting = set(grid.push_messages(messages))
        while waiting:
            for number in list(waiting):
                waiting -= {m.metadata.reply_to_message_id for m in grid.pull_messages([number])}
            time.sleep(0.5)
        seconds.append(time.perf_counter() - began)
    OUT.write_text(json.dumps(seconds))
"""


def config(images: Path, rounds: int) -> Config:
    """Returns the settings for the paper's model with one step of training."""
    paper = fit_to_nodes(load_recipe("cifar10-iid"), NODES)
    return replace(
        paper,
        rounds=rounds,
        data=replace(paper.data, name=str(images)),
        training=replace(paper.training, epochs=1),
        evaluation=replace(paper.evaluation, every=rounds, devices=False),
        targets={},
    )


def fleet(chosen: Config, place: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Plays a run. Returns its records and timings."""
    with LocalFleet(place / "fleet", chosen, NODES).start() as local_fleet:
        steps = list(local_fleet.play(place / "run"))
    return [record for record, _ in steps], [timing for _, timing in steps]


class FlowerFleet(LocalFleet):
    """A fleet of Flower's own nodes, which start a process for every message."""

    def start_node(self, name: str) -> None:
        home = self.path / NODES_FOLDER / name
        self.processes.start(name, self.project.supernode_command(name, free_port(), {}), home, **FAST_POLLING)


def bare(sizes: list[int], rounds: int, place: Path, chosen: Config) -> list[float]:
    """Returns the seconds of each round of a Flower app that only transports arrays of these sizes."""
    local_fleet, out = FlowerFleet(place / "bare", chosen, NODES), place / "bare.json"
    with local_fleet.start():
        text = BARE.replace("@SIZES@", str(sizes)).replace("@ROUNDS@", str(rounds)).replace("@OUT@", str(out))
        (local_fleet.project.path / "fleet_app" / "apps.py").write_text(text)
        local_fleet.superlink.start(chosen, place / "none")
        while not out.is_file():
            time.sleep(0.5)
        time.sleep(0.5)
    seconds: list[float] = json.loads(out.read_text())
    return seconds


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        place, rng = Path(folder), np.random.default_rng(0)
        number = IMAGES * sum(NODES.values())
        x, y = rng.integers(0, 256, (number, 3, 32, 32), dtype=np.uint8), np.arange(number) % 10
        np.savez(place / "images.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        chosen = config(place / "images.npz", rounds)
        records, timing = fleet(chosen, place)
        sent = {tier: n // NODES[tier] for tier, n in records[-1]["bytes"]["down"].items()}
        carried = bare([sent[tier] for tier, many in NODES.items() for _ in range(many)], rounds, place, chosen)
    print(json.dumps({"bytes each way by device": sent, "late": sum(len(r.get("late", [])) for r in records)}))
    for name, seconds in (("fleet", [t["total"] for t in timing]), ("bare Flower", carried)):
        print(f"{name}: median {statistics.median(seconds):.1f} s a round, all {[round(s, 1) for s in seconds]}")


if __name__ == "__main__":
    main()
