"""The script that every rank of `test_ranks.py` runs, with or without torchrun.

python ranks_script.py train|errors|lost FOLDER
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import fedhen
from fedhen.cli import main
from fedhen.distributed import process_group
from fedhen.distributed.communicator import RankLost
from fedhen.distributed.process_group import has_lost
from fedhen.errors import FedhenError
from fedhen.interrupts import stop_ranks_after_round
from fedhen.params import Average
from fedhen.privacy.noise import FRESH_NOISE
from support.families import texts, two_exits, words
from support.private_rounds import make_central, nested, play
from support.tiny import TINY, as_options

RANK = int(os.environ.get("RANK", "0"))


def data(seed: int = 0) -> fedhen.Data:
    """Returns devices of 3 to 12 examples, so that the ranks have shares of unequal length."""
    rng = np.random.default_rng(seed)
    devices = [(rng.normal(size=(n, 6)), rng.integers(0, 3, n)) for n in range(3, 13)]
    return fedhen.per_device(devices, rng.normal(size=(50, 6)), rng.integers(0, 3, 50), classes=3)


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaffold": {"local": {"name": "scaffold"}},
    "feddyn": {"local": {"name": "feddyn"}},
    "optimisers": {
        "training": {"optimizer": "adamw", "lr": 0.01, "optimizer_state": "device", "epsilon": 0.01},
        "server": {"optimizer": "adam", "lr": 0.1, "tau": 0.1},
    },
    "topk": {"wire": {"down": "bf16", "up": "topk", "keep": 0.3}},
    "int8": {"wire": {"up": "int8"}},
    "oort": {"devices": {"active": 5, "sampling": "oort"}, "clock": {"profile": "mixed"}},
    "ditto": {"personal": {"name": "ditto", "adapt_epochs": 1}, "evaluation": {"every": 3, "own": True}},
}
"""Name -> settings."""


def train(folder: Path) -> None:
    for name, more in RUNS.items():
        settings: dict[str, Any] = {"rounds": 6, "devices": {"active": 5}, "evaluation": {"every": 2}, **more}
        run = fedhen.train(two_exits(), data(), out=folder / name, accelerator="cpu", **settings)
        # In one write: the ranks share one output.
        sys.stderr.write(f"{name}: rank {RANK} has {sorted(run.experiment.last_models.rows)}\n")
        assert run.model("simple", "devices") is not None, "any rank can ask, without the others"
    # Devices 2 and 5 fail, on whichever rank they train.
    faulty: dict[str, Any] = {
        "rounds": 3,
        "devices": {"active": 8},
        "training": {"epochs": 1},
        "evaluation": {"every": 3},
    }
    fedhen.train(words(), texts([2, 5]), out=folder / "faults", accelerator="cpu", **faulty)
    averages(folder)


def averages(folder: Path) -> None:
    """Averages corners, rows and whole tensors, half of them on each rank. No model holds d, only the last holds b."""
    ranks = process_group.join(torch.device("cpu"))
    shapes = {"a": (2, 2), "b": (3,), "c": (2,), "d": (1,)}
    models = [
        ({"a": torch.ones(2, 2)}, 1.0, {}),
        ({"a": torch.full((1, 2), 3.0), "c": torch.ones(2)}, 2.0, {}),
        ({"a": torch.full((2, 2), 5.0), "c": torch.full((2,), 4.0)}, 1.0, {"c": torch.tensor([True, False])}),
        ({"b": torch.arange(3.0)}, 3.0, {}),
    ]
    average = Average(shapes)
    for number, (weights, weight, rows) in enumerate(models):
        if number % ranks.number == ranks.rank:
            average.add(weights, weight, rows)
    found = ranks.combine(average).finish({name: torch.full(shape, -1.0) for name, shape in shapes.items()})
    if not ranks.rank:
        text = repr({name: tensor.tolist() for name, tensor in found.items()})
        (folder / "average.txt").write_text(text)


def private(folder: Path) -> None:
    """Plays a run with differential privacy, then a round whose noise is fresh, and writes that noise."""
    settings: dict[str, Any] = {
        "rounds": 4,
        "devices": {"active": 5},
        "evaluation": {"devices": False},
        "privacy": {"mechanism": "central", "bound": 0.5, "noise": 0.5, "within": 0.5, "separation": 2},
    }
    fedhen.train(two_exits(), data(), out=folder / "run", accelerator="cpu", **settings)
    ranks, server = process_group.join(torch.device("cpu")), nested({"a": [5]}, {})
    mechanism = make_central(server, {"simple": 1, "complex": 1}, ranks=ranks, source=FRESH_NOISE)
    noise = play(mechanism, server, [])["simple"]["a"].tolist()
    (folder / f"noise-{ranks.rank}.json").write_text(repr(noise))


def errors(folder: Path) -> int:
    """Gives the ranks unlike data; then an error on all ranks, on rank 0 alone, and on rank 1 alone."""
    try:
        # As in a script that draws without a seed.
        fedhen.train(two_exits(), data(seed=RANK), accelerator="cpu", rounds=1, devices={"active": 5})
    except FedhenError as error:
        print(f"rank {RANK}: {error}", file=sys.stderr)
    assert main(["run", "digits", "--set", "training.nothing=1"]) == 2
    assert main(["run", "digits", "--rounds", "1", "--quiet", "--out", str(folder)]) == 2
    if RANK:
        # As on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    small = as_options([*TINY, "devices.active=4"])
    on_disk = ["--set", "runtime.storage=disk", "--set", f"runtime.storage_dir={folder}"]
    return main(["run", "digits", "--rounds", "1", "--quiet", "--out", str(folder / "none"), *small, *on_disk])


def lost(folder: Path) -> int:
    """Rank 1 ends. Rank 0 gets SIGTERM while it is about to report that, and again while it reports it."""
    ranks = process_group.join(torch.device("cpu"))
    ranks.gather(0)
    if RANK:
        os._exit(3)
    try:
        with stop_ranks_after_round(ranks.rank, has_lost):
            try:
                ranks.gather(0)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
    except RankLost as error:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        print(f"fedhen: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit({"train": train, "private": private, "errors": errors, "lost": lost}[sys.argv[1]](Path(sys.argv[2])))
