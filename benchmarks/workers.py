"""Measures how much faster all workers are than one: two processes play rounds in turns on this machine.

    python benchmarks/workers.py [--work digits,mlp] [--pairs 9] [--against SRC] [--json FILE]

Each side is a separate process and plays rounds for about a second before the other has its turn. The ratio is the
median over the pairs. With --against, the other side is the fast engine of another version: SRC is its `src` folder,
with this script as it was then in `benchmarks` next to it. A work named -bf16 is compared with fp32 on the other side.
`first` is the time from a configuration to the end of the first round, in a new process each time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

TURN_SECONDS = 1.0
"""A side plays at least this long before the other has its turn."""
HERE = Path(__file__).resolve().parent.parent / "src"


def recipe(name: str, *changes: str, method: str = "fedhen") -> Callable[[], Any]:
    """Returns a loader of a recipe, with the settings of the method."""

    def load() -> Any:
        from fedhen.algorithm.methods import load_method
        from fedhen.config.recipes import load_recipe
        from fedhen.config.toml import apply_settings
        from fedhen.config.validation import from_mapping

        chosen = load_method(method)
        base = load_recipe(name)
        config = chosen.keep_tiers(from_mapping({**chosen.settings(base), "method": method}, base))
        return apply_settings(config, list(changes)), None, None

    return load


def own_family(name: str, **settings: Any) -> Callable[[], Any]:
    """Returns a loader of a family and data that are given from Python, as a user does."""

    def load() -> Any:
        import torch
        from torch import nn

        import fedhen
        from fedhen.config.validation import from_mapping

        torch.manual_seed(0)
        family, data = {"mlp": mlp, "lstm": lstm, "transformer": transformer}[name](torch, nn, fedhen)
        base = {"data": {"name": "python"}, "model": {"family": "python"}, "recipe": name}
        return from_mapping({**base, **settings}), family, data

    return load


def mlp(torch: Any, nn: Any, fedhen: Any) -> Any:
    """The README's example."""

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self, deep: bool) -> None:
            super().__init__()
            self.body, self.exit = nn.Linear(20, 32), nn.Linear(32, 4)
            self.top = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)) if deep else None

        def forward(self, x: Any) -> Any:
            h = self.body(x).relu()
            return [self.exit(h)] if self.top is None else [self.exit(h), self.top(h)]

    y = torch.randint(0, 4, (1000,))
    x = torch.randn(1000, 20) + 3 * nn.functional.one_hot(y, 20)
    family = fedhen.Family({"simple": lambda: Net(False), "complex": lambda: Net(True)})
    return family, fedhen.arrays(x[:800], y[:800], x[800:], y[800:])


def words(torch: Any, fedhen: Any, examples: int, length: int) -> Any:
    """Texts of random words, padded with word 0. The label is the first word modulo four."""
    x = torch.randint(1, 200, (examples, length))
    y = x[:, 0] % 4
    x[torch.arange(length)[None] >= torch.randint(length // 2, length + 1, (examples, 1))] = 0
    cut = examples * 4 // 5
    return fedhen.arrays(x[:cut], y[:cut], x[cut:], y[cut:], classes=4)


def lstm(torch: Any, nn: Any, fedhen: Any) -> Any:
    """Two layers of LSTM, an exit after each."""

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self, deep: bool) -> None:
            super().__init__()
            self.embed = nn.Embedding(200, 32)
            self.first, self.exit = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 4)
            self.second: Any = nn.LSTM(64, 64, batch_first=True) if deep else None
            self.top: Any = nn.Linear(64, 4) if deep else None

        def forward(self, x: Any) -> Any:
            h, _ = self.first(self.embed(x))
            exits = [self.exit(h[:, -1])]
            if self.second is not None:
                h, _ = self.second(h)
                exits.append(self.top(h[:, -1]))
            return exits

    family = fedhen.Family({"simple": lambda: Net(False), "complex": lambda: Net(True)})
    return family, words(torch, fedhen, 1000, 20)


def transformer(torch: Any, nn: Any, fedhen: Any) -> Any:
    """Four layers with dropout and `padding_idx`, an exit after the second and after the fourth."""

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.embed = nn.Embedding(200, 64, padding_idx=0)
            self.place = nn.Parameter(0.1 * torch.randn(32, 64))
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True) for _ in range(layers)
            )
            self.exit, self.top = nn.Linear(64, 4), nn.Linear(64, 4) if layers > 2 else None

        def forward(self, x: Any) -> Any:
            blank, h, exits = x == 0, self.embed(x) + self.place, []
            for number, layer in enumerate(self.layers, start=1):
                h = layer(h, src_key_padding_mask=blank)
                if number == 2:
                    exits.append(self.exit(h.mean(1)))
            return exits if self.top is None else [*exits, self.top(h.mean(1))]

    family = fedhen.Family({"simple": lambda: Net(2), "complex": lambda: Net(4)})
    return family, words(torch, fedhen, 1000, 32)


SMALL = {"rounds": 10**6, "devices": {"number": 20, "active": 6}, "training": {"epochs": 2, "batch_size": 10}}
README = {"rounds": 10**6, "devices": {"number": 20, "active": 5}}
WORK: dict[str, Callable[[], Any]] = {
    "digits": recipe("digits", "rounds=1000000"),
    "digits-4": recipe("digits-4", "rounds=1000000"),
    "mlp": own_family("mlp", **README),
    "lstm": own_family("lstm", **SMALL, evaluation={"every": 1}),
    "heterofl": recipe("digits", "rounds=1000000", method="heterofl"),
    "transformer": own_family("transformer", **SMALL, evaluation={"every": 1}),
    "cifar10-iid": recipe("cifar10-iid", "rounds=1000000"),
    "cifar10-iid-bf16": recipe("cifar10-iid", "rounds=1000000", "runtime.precision=bf16"),
}
USUAL = [name for name in WORK if not name.startswith("cifar")]


def side(options: argparse.Namespace) -> None:
    """One side: warms up, then plays a turn for every line of standard input and prints its rounds and seconds."""
    import torch

    from fedhen.config.toml import apply_settings
    from fedhen.experiment.build import build_experiment

    began = time.perf_counter()
    config, family, data = WORK[options.side]()
    if options.workers:
        config = apply_settings(config, [f"runtime.workers={options.workers}"])
    if options.side.startswith("cifar"):
        from fedhen.data.dataset import Data

        y = torch.randint(0, 10, (50000,))
        data = Data(
            torch.randint(0, 256, (50000, 3, 32, 32)).float().div_(255), y, torch.zeros(10, 3, 32, 32), y[:10], 10
        )
    steps = build_experiment(config, data=data, family=family, accelerator="cpu").play()
    next(steps)
    print(time.perf_counter() - began, flush=True)
    for line in sys.stdin:
        # Both sides play the same rounds. The first of a pair decides how many.
        rounds, played, begun = int(line), 0, time.perf_counter()
        while played < rounds or (not rounds and time.perf_counter() - begun < TURN_SECONDS):
            next(steps)
            played += 1
        print(json.dumps([played, time.perf_counter() - begun]), flush=True)


class Side:
    """A process that plays rounds on request."""

    def __init__(self, work: str, src: Path, workers: int) -> None:
        script = src.parent / "benchmarks" / Path(__file__).name
        command = [sys.executable, str(script), "--side", work, "--workers", str(workers)]
        environment = {**os.environ, "PYTHONPATH": str(src)}
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.first = float(self.answer())

    def answer(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit("a side has ended")
        return line

    def play(self, rounds: int) -> tuple[int, float]:
        """Plays that many rounds, or for a turn if it is 0. Returns the number of rounds and their seconds."""
        assert self.process.stdin is not None
        print(rounds, file=self.process.stdin, flush=True)
        played, seconds = json.loads(self.answer())
        return played, seconds

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(work: str, pairs: int, other: tuple[Path, int]) -> dict[str, float]:
    """Returns the seconds a round of both sides, and the median of their ratios."""
    sides = ((work, HERE, 0), (work.removesuffix("-bf16"), *other))
    starts = [[Side(*each) for each in sides] for _ in range(1 if work.startswith("cifar") else 3)]
    first = [median(pair[k].first for pair in starts) for k in (0, 1)]
    for pair in starts[1:]:
        for one in pair:
            one.end()
    both, seconds = starts[0], list[tuple[float, float]]()
    for number in range(pairs):
        rounds, turn = 0, [0.0, 0.0]
        for k in (0, 1) if number % 2 else (1, 0):
            rounds, taken = both[k].play(rounds)
            turn[k] = taken / rounds
        seconds.append((turn[0], turn[1]))
    for one in both:
        one.end()
    mine, others = (median(pair[k] for pair in seconds) for k in (0, 1))
    ratio = median(other / own for own, other in seconds)
    return {"seconds": mine, "other": others, "ratio": ratio, "first": first[0], "other_first": first[1]}


def main() -> None:
    """Measures all works, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default=",".join(USUAL), help=f"of {', '.join(WORK)}")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--against", type=Path, help="the src folder of another version")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side(options)
        return
    other = (options.against, 0) if options.against else (HERE, 1)
    print(f"{'work':18} {'s a round':>10} {'other':>10} {'ratio':>7} {'first':>7} {'other':>7}")
    found = {}
    for work in options.work.split(","):
        found[work] = each = measure(work, options.pairs, other)
        print(
            f"{work:18} {each['seconds']:10.4f} {each['other']:10.4f} {each['ratio']:7.2f} "
            f"{each['first']:7.2f} {each['other_first']:7.2f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
