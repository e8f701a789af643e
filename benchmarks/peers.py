"""fedhen beside pfl-research, Flower's simulation engine and a bare torch loop: seconds a round of the same work.

    python benchmarks/peers.py [--only pfl,flower] [--rounds 9] [--json]

The peers are installed into `.peers/` and stay there. Every side is a process of its own that plays a round when it is
told to: round 1 of every side, round 2 of every side, so that all see the same machine; those that wait are stopped.
A round is 50 of 200 devices with 50 images each, one epoch in batches of 10, without evaluation, in fp32 on the CPU.
All sides start from the same weights and train the same devices; in the first round, which does not count, they visit
the images in the same order too, and must end it with the same weights.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"
REQUIREMENTS = {"pfl": ["pfl[pytorch]==0.6.0"], "flower": ["flwr[simulation]==1.41.0"]}
DEVICES, ACTIVE, IMAGES, BATCH, CLASSES, LR, SEED = 200, 50, 50, 10, 10, 0.1, 0
CORES = len(os.sched_getaffinity(0))
WARM = 2
"""Rounds of each side before those that count."""
PATIENCE = 900.0
"""Seconds after which a side is given up."""
ALIKE = 0.02
"""How far apart, as a share of the way, the first round may end: rounding turns ReLUs over; another order gives 0.3."""

Order = list[int] | None


class Exits(nn.Sequential):
    """A network with its logits in a list, as fedhen wants them."""

    def forward(self, x: Tensor) -> list[Tensor]:
        """The logits of the only exit."""
        return [super().forward(x)]  # type: ignore[no-untyped-call]


def network(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    """The network, always with the same weights."""
    conv, relu, pool = nn.Conv2d, nn.ReLU(), nn.MaxPool2d(2)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        body = [conv(3, 32, 3), relu, conv(32, 32, 3), relu, pool, conv(32, 64, 3), relu, conv(64, 64, 3), relu, pool]
        return kind(*body, nn.Flatten(), nn.Linear(1600, 512), relu, nn.Linear(512, CLASSES))


reused = lru_cache(network)
"""The network in which a process of Ray trains all its devices."""


@lru_cache
def images() -> tuple[Tensor, Tensor]:
    """Random images and labels of all devices."""
    draw = np.random.default_rng(SEED)
    x = draw.standard_normal((DEVICES, IMAGES, 3, 32, 32), dtype=np.float32)
    return torch.from_numpy(x), torch.from_numpy(draw.integers(0, CLASSES, (DEVICES, IMAGES)))


def held(device: int, order: Order) -> tuple[Tensor, Tensor]:
    """What a device trains on, in that order if there is one."""
    x, y = (part[device] for part in images())
    return (x, y) if order is None else (x[order], y[order])


def train_plainly(net: nn.Module, device: int, order: Order) -> None:
    """One epoch of SGD on a device, as one writes it in torch."""
    x, y = held(device, order)
    optimiser = torch.optim.SGD(net.parameters(), lr=LR)
    for begin in range(0, IMAGES, BATCH):
        optimiser.zero_grad()
        loss = cross_entropy(net(x[begin : begin + BATCH]), y[begin : begin + BATCH])
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def flat(weights: Mapping[str, Tensor]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """All weights in one vector, by name."""
    return torch.cat([w.detach().flatten() for _, w in sorted(weights.items())]).numpy()


class Turns:
    """A side's end of the conversation: wait for a round, play it, say how long it took."""

    def __init__(self, *packages: str) -> None:
        names = ("torch", "numpy", *packages)
        self.versions = {"python": platform.python_version(), **{n: importlib.metadata.version(n) for n in names}}
        self.began, self.task = 0.0, dict[str, Any]()
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what anyone else prints is no answer

    def next(self, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """The last round is over, if there was one; wait for the next."""
        answer: dict[str, Any] = {"seconds": time.perf_counter() - self.began} if self.began else self.versions
        if self.task.get("save"):
            np.save(self.task["save"], flat(weights()))
        print(json.dumps(answer), file=self.answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        self.task, self.began = json.loads(line), time.perf_counter()

    def active(self) -> Iterator[tuple[int, Order]]:
        """The active devices, each with the order of its images."""
        return zip(self.task["devices"], self.task["orders"] or itertools.repeat(None))  # noqa: B905


def play_torch() -> None:
    """A bare loop: one device after the other, and the mean of what they changed."""
    turns, net = Turns(), network()
    whole = {name: w.clone() for name, w in net.state_dict().items()}
    while True:
        turns.next(lambda: whole)
        change = {name: torch.zeros_like(w) for name, w in whole.items()}
        for device, order in turns.active():
            net.load_state_dict(whole)
            train_plainly(net, device, order)
            for name, w in net.state_dict().items():
                change[name] += (w - whole[name]) / ACTIVE
        for name, w in whole.items():
            w += change[name]


def play_pfl(processes: int = 1) -> None:
    """pfl as its CIFAR-10 benchmark sets it up, on data in memory, which its manual calls the fastest."""
    rank = int(os.environ.get("PFL_WORKER_RANK", "0"))
    if processes > 1 and not rank:
        with socket.create_server(("localhost", 0)) as free:
            os.environ["PFL_WORKER_ADDRESSES"] = ",".join([f"localhost:{free.getsockname()[1]}"] * processes)
        for other in reversed(range(processes)):
            os.environ["PFL_WORKER_RANK"] = str(other)
            if other:
                subprocess.Popen(command(sys.executable, "pfl_processes"), stdout=sys.stderr)
    from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
    from pfl.aggregate.weighting import WeightByDatapoints  # type: ignore[import-not-found]
    from pfl.algorithm import FederatedAveraging, NNAlgorithmParams  # type: ignore[import-not-found]
    from pfl.data import FederatedDataset  # type: ignore[import-not-found]
    from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
    from pfl.hyperparam import NNTrainHyperParams  # type: ignore[import-not-found]
    from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]

    turns, net, visits = Turns("pfl"), network(), iter(list[tuple[int, Order]]())
    # Nothing is scored but the very first round.
    vars(net).update(loss=lambda x, y: cross_entropy(net(x), y), metrics=lambda x, y: {})
    data = FederatedDataset(lambda visit: Dataset(held(*visit)), lambda: next(visits))
    backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()])
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    training = NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LR)
    algorithm = FederatedAveraging()
    for number in itertools.count(1):
        if not rank:
            turns.next(net.state_dict)
        if processes > 1:
            torch.distributed.broadcast_object_list(told := [turns.task])
            turns.task = told[0]
        visits = itertools.cycle(turns.active())  # pfl draws for all processes, and may draw beyond the last device
        rounds = NNAlgorithmParams(number, evaluation_frequency=10**6, train_cohort_size=ACTIVE, val_cohort_size=None)
        algorithm.run(rounds, backend, model, training, send_metrics_to_platform=False)


def train_flower(message: Any, context: Any) -> Any:
    """What Flower's client does on a device."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    net, config = reused(), message.content["config"]
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train_plainly(net, config["device"], config["order"] or None)
    reply: Any = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": IMAGES})}
    return Message(RecordDict(reply), reply_to=message)


def play_flower() -> None:
    """Flower's simulation engine with one process of Ray a core."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    turns, server, client = Turns("flwr", "ray"), ServerApp(), ClientApp()

    class InTurns(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            turns.next(arrays.to_torch_state_dict)
            messages = list(super().configure_train(server_round, arrays, config, grid))
            for message, (device, order) in zip(messages, turns.active(), strict=True):
                own = ConfigRecord({"device": device, "order": order or []})
                message.content = RecordDict({"arrays": arrays, "config": own})
            return messages

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            if len(replies) < ACTIVE or any(reply.has_error() for reply in replies):
                os._exit(1)  # Flower would go on without them
            return super().aggregate_train(server_round, replies)

    @server.main()
    def serve(grid: Any, context: Any) -> None:
        strategy = InTurns(ACTIVE / DEVICES, 0.0, min_train_nodes=ACTIVE, min_available_nodes=DEVICES)
        strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=10**6, timeout=PATIENCE)

    client.train()(train_flower)
    ray = {"num_cpus": CORES, "include_dashboard": False, "log_to_driver": False, "_temp_dir": str(PEERS / "ray")}
    setup: Any = {"init_args": ray, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, DEVICES, backend_config=setup)


def play_fedhen() -> None:
    """fedhen with a single tier, as it comes."""
    import fedhen
    from fedhen.config.data_settings import OWN
    from fedhen.config.settings import Config
    from fedhen.config.validation import from_mapping
    from fedhen.experiment.build import build_experiment

    turns, (x, y) = Turns(), images()
    training = {"epochs": 1, "batch_size": BATCH, "lr": LR, "weight_decay": 0.0, "clip": 1e9}
    fleet = {"tiers": {"only": 1.0}, "devices": {"number": DEVICES, "active": ACTIVE}, "training": training}
    own = {"data": {"name": OWN}, "model": {"family": OWN}, "runtime": {"precision": "fp32"}}
    # The last round would be scored.
    rounds = {"method": "fedavg", "seed": SEED, "rounds": 10**6, "evaluation": {"devices": False, "every": 10**6}}
    experiment = build_experiment(
        from_mapping({**rounds, **fleet, **own}, Config()),
        data=fedhen.per_device(list(zip(x, y, strict=True)), x[0], y[0], CLASSES),
        family=fedhen.Family({"only": lambda: network(Exits)}),
        activate=lambda number, losses: turns.task["devices"],
        accelerator="cpu",
    )
    turns.next(dict)
    for _ in experiment.play():
        turns.next(lambda: experiment.server["only"])


def play_pfl_processes() -> None:
    """pfl in one process a core, as its manual advises where models and data are small."""
    play_pfl(CORES)


SIDES = {"pfl": "pfl", "pfl_processes": "pfl", "flower": "flower", "torch": "", "fedhen": ""}
"""Each with the peer whose environment it needs."""


class Lost(Exception):
    """Why a side cannot be measured."""


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def installed(peer: str) -> str:
    """The interpreter of a peer's environment, which is made if it is not there."""
    home, python = PEERS / peer, sys.executable
    own = str(home / "bin" / "python")
    pins = [pin for pin in (ROOT / "constraints.txt").read_text().split() if pin.startswith(("torch==", "numpy=="))]
    wanted, stamp = [*REQUIREMENTS[peer], *pins], home / "ready"
    if stamp.is_file() and stamp.read_text().split() == wanted:
        return own
    if sys.version_info >= (3, 13):
        python = next(filter(shutil.which, ("python3.12", "python3.11")), "")
        if not python:
            raise Lost("pfl needs Python 3.10 to 3.12: put python3.12 on the PATH")
    say(f"installing {' '.join(wanted)} into {home}")
    pip = [own, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", *wanted]
    for step in ([python, "-m", "venv", "--clear", str(home)], pip):
        done = subprocess.run(step, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
            why = [line for line in lines if "ERROR" in line] or lines
            raise Lost(f"it cannot be installed, try again where PyPI can be reached: {why[-1]}")
    stamp.write_text(" ".join(wanted))
    return own


def command(python: str, side: str) -> list[str]:
    """What starts a side: this file imported, not run, so that Ray's processes find what Flower sends them."""
    return [python, "-c", f"import peers; peers.play_{side}()"]


class Side:
    """A process that plays rounds when it is told to, and is stopped in between: Flower's never rest by themselves."""

    def __init__(self, name: str) -> None:
        python = installed(SIDES[name]) if SIDES[name] else sys.executable
        paths = os.pathsep.join([str(ROOT / "benchmarks"), *([str(ROOT / "src")] if name == "fedhen" else [])])
        own = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "FLWR_HOME": str(PEERS / "flwr")}
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        one_thread = {"OMP_NUM_THREADS": "1"} if name == "pfl_processes" else {}  # as torchrun does
        self.name, self.log = name, PEERS / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command(python, name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **own, **quiet, **one_thread},
                text=True,
                process_group=0,  # of this session: should we be killed, the kernel ends what we have stopped
            )

    def hear(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout
        if select.select([self.process.stdout], [], [], PATIENCE)[0] and (line := self.process.stdout.readline()):
            answer: dict[str, Any] = json.loads(line)
            return answer
        last = (self.log.read_text(errors="replace").strip() or "it says nothing").splitlines()[-1]
        raise Lost(f"{self.name} is lost, see {self.log}: {last}")

    def ask(self, task: dict[str, Any]) -> float:
        """Seconds that a round takes."""
        assert self.process.stdin
        os.killpg(self.process.pid, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
        seconds = float(self.hear()["seconds"])
        os.killpg(self.process.pid, signal.SIGSTOP)
        return seconds

    def end(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def tasks(rounds: int) -> list[dict[str, Any]]:
    """The rounds: who is active, and in the first one the order in which fedhen will visit the images."""
    from fedhen.algorithm.sampling import make_sampler
    from fedhen.config.devices_settings import DevicesConfig
    from fedhen.data.batches import plan_visits
    from fedhen.seeds import DeviceStreams

    def order(device: int) -> list[int]:
        plan = plan_visits(np.arange(IMAGES), 1, BATCH, False, DeviceStreams(SEED, (1, device)))
        return [int(example) for example in plan.examples]

    who = [make_sampler(DevicesConfig(DEVICES, ACTIVE), SEED)(number, {}) for number in range(1, WARM + rounds + 1)]
    return [{"devices": active, "orders": None if n else [*map(order, active)]} for n, active in enumerate(who)]


def measure(names: list[str], rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of the rounds of every side, and its versions; a side that cannot be started has neither."""
    sides, versions, seconds = dict[str, Side](), dict[str, Any](), dict[str, list[float]]()
    planned = list(enumerate(tasks(rounds), 1))

    def play(name: str, number: int, task: dict[str, Any]) -> float:
        which = {1: "first", len(planned): "last"}.get(number)
        return sides[name].ask({**task, "save": which and str(PEERS / f"{name}-{which}.npy")})

    try:
        for name in names:
            try:
                sides[name] = Side(name)
                versions[name] = sides[name].hear()
                say(f"{name}: warm-up " + ", ".join(f"{play(name, *each):.3f} s" for each in planned[:WARM]))
                seconds[name] = []
            except Lost as error:
                say(f"without {name}: {error}")
        for number, task in planned[WARM:]:
            for name, own in seconds.items():
                own.append(play(name, number, task))
            say(f"round {number - WARM}: " + ", ".join(f"{name} {own[-1]:.3f} s" for name, own in seconds.items()))
    finally:
        for side in sides.values():
            side.end()
        shutil.rmtree(PEERS / "ray", ignore_errors=True)
    if "fedhen" not in seconds:
        raise Lost("there is nothing to compare with")
    return seconds, {name: versions[name] for name in seconds}


def checked(names: list[str]) -> dict[str, Any]:
    """How far from fedhen each side ends the first round, as a share of the way, and how far it goes in all rounds."""
    begin = flat(network().state_dict())
    first, last = ({n: np.load(PEERS / f"{n}-{which}.npy") - begin for n in names} for which in ("first", "last"))
    whole = np.linalg.norm(first["fedhen"])
    apart = {name: float(np.linalg.norm(own - first["fedhen"]) / whole) for name, own in first.items()}
    way = {name: float(np.linalg.norm(own)) for name, own in last.items()}
    return {"weights": len(begin), "apart": apart, "way": way, "same": max(apart.values()) < ALIKE}


def table(found: dict[str, Any]) -> str:
    """The same for people."""
    check, steps = found["check"], ACTIVE * IMAGES // BATCH
    lines = [
        f"{check['weights']:,} weights, {ACTIVE} of {DEVICES} devices and {steps} local steps a round",
        f"median of {found['rounds']} rounds in turns on {found['hardware']['cpu']}, {CORES} cores",
        f"{'':<14}{'s a round':>10}{'least':>9}{'most':>9}{'/ fedhen':>10}{'apart':>9}  with",
    ]
    for name, own in found["seconds"].items():
        numbers = f"{found['cnn'][name]:>10.3f}{min(own):>9.3f}{max(own):>9.3f}{found['ratios'][name]:>10.2f}"
        versions = ", ".join(f"{package} {version}" for package, version in found["versions"][name].items())
        lines.append(f"{name:<14}{numbers}{check['apart'][name]:>9.0e}  {versions}")
    return "\n".join(lines)


def main() -> None:
    """Measure, check, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"only these beside fedhen, with commas: {', '.join(list(SIDES)[:-1])}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    asked = options.only.split(",") if options.only else list(SIDES)
    if unknown := sorted({*asked} - {*SIDES}):
        parser.error(f"there is no {unknown[0]}: name some of {', '.join(SIDES)}")
    PEERS.mkdir(exist_ok=True)
    load = os.getloadavg()[0]
    if load > 0.5:
        say(f"others work on this machine (load {load:.1f}): the figures will suffer, those of many threads most")
    sys.path.insert(0, str(ROOT / "src"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    seconds, versions = measure([name for name in SIDES if name in {*asked, "fedhen"}], options.rounds)
    took = {name: round(median(seconds[name]), 4) if name in seconds else None for name in SIDES}
    ratios = {name: round(median(own) / median(seconds["fedhen"]), 3) for name, own in seconds.items()}
    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0] or platform.machine()
    found = {
        "cnn": {**took, "ratio": ratios.get("pfl")},
        "ratios": ratios,
        "rounds": options.rounds,
        "seconds": seconds,
        "check": checked(list(seconds)),
        "hardware": {"cpu": cpu, "cores": CORES, "load_before": load},
        "versions": versions,
    }
    print(json.dumps(found, indent=1) if options.json else table(found))
    if not found["check"]["same"]:
        sys.exit("the sides did not do the same work: see `apart`")


if __name__ == "__main__":
    try:
        main()
    except (Lost, KeyboardInterrupt) as error:
        sys.exit(str(error) or "stopped")
