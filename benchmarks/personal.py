"""Personal models on the digits: every method on FedHeN's two tiers, over five seeds, Dirichlet 0.3.

    python benchmarks/personal.py [--seeds 0,1,2,3,4] [--rounds 20] [--out DIR] [--bytes] [--methods ditto,fedrep]

Runs what is missing under --out, one run at a time, and prints Markdown tables of the devices' accuracies on their own
test data: of those that trained, and of the fifth that did not. What is finished is not run again. --bytes prints
instead what a device sends in a round and direction, and what it keeps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import fedhen
from fedhen.config.recipes import load_recipe
from fedhen.config.validation import from_mapping
from fedhen.experiment.build import build_experiment
from fedhen.params import count_bytes
from fedhen.reports.own_data import last_values
from fedhen.runs.device_values import describe_owners
from fedhen.runs.reader import Run, read_run
from fedhen.wire.wire import count_down

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "finetune": {},
    "finetune, exit only": {"part": ["exit"]},
    "fedper": {},
    "fedrep": {"epochs": 3, "body_epochs": 3},
    "fedbabu": {},
    "ditto": {"pull": 0.1},
    "perfedavg, first": {"alpha": 0.02, "steps": 5},
    "perfedavg, hessian-free": {"alpha": 0.02, "order": "hessian-free"},
    "perfedavg, full": {"alpha": 0.02, "steps": 5, "order": "full"},
    "proto": {},
}
"""Name, up to a comma as in `personal.name` -> other settings of `personal`.

Where they are not the defaults, they were chosen on seed 100, which is not among those that are reported.
"""
TIERS = ("simple", "complex")
COLUMNS = ("mean", "gain", "deviation", "worst tenth", "best tenth", "hurt", "its server")
"""Gain: over FedHeN's global model, seed by seed. Its server: the mean of the method's own server's model."""
HELD_OUT_COLUMNS = ("mean", "gain", "hurt")
"""There are two devices of a tier, too few for a spread."""


def make_settings(method: str, seed: int, rounds: int) -> dict[str, Any]:
    personal = {"name": method.partition(",")[0], **METHODS[method]}
    # About as many as a device trains in the run: 6 of 16 devices are active in a round, for 3 epochs.
    local = round(rounds * 3 * 6 / 16) if method == "none" else 0
    return {
        "seed": seed,
        "rounds": rounds,
        "personal": personal,
        "devices": {"held_out": 0.2},
        "evaluation": {"every": rounds, "own": True, "devices": False, "local_epochs": local},
        "runtime": {"workers": 1},
    }


def train(out: Path, method: str, seed: int, rounds: int) -> Run:
    """Returns a run, which is played unless it is there."""
    folder = out / f"{method.replace(', ', '-').replace(' ', '-')}-seed{seed}-{rounds}rounds"
    if not (folder / "summary.json").is_file():
        settings = make_settings(method, seed, rounds)
        fedhen.run("digits", run_dir=folder, overwrite=folder.exists(), progress=False, accelerator="cpu", **settings)
        print(f"{folder.name} is done", flush=True)
    return read_run(folder)


def make_cells(runs: Sequence[Run], plain: Sequence[Run], owner: str, tier: str, held_out: bool) -> dict[str, str]:
    """Returns the cells of a row, in percent. `plain` are the runs of the same seeds without personal models."""
    found, base = ([describe_owners(last_values(run, held_out), run.metric) for run in each] for each in (runs, plain))
    own = [each[owner][tier] for each in found]
    gains = [one.mean - each["server"][tier].mean for one, each in zip(own, base, strict=bool(base))]
    return {
        "mean": show([spread.mean for spread in own]),
        "gain": show(gains, sign="+") if owner != "server" else "–",
        "deviation": show([spread.deviation for spread in own]),
        "worst tenth": show([spread.worst_tenth for spread in own]),
        "best tenth": show([spread.best_tenth for spread in own]),
        "hurt": show([spread.hurt for spread in own if spread.hurt is not None]),
        "its server": show([each["server"][tier].mean for each in found if "server" in each]),
    }


def show(values: Sequence[float], sign: str = "") -> str:
    """Writes mean ± deviation over the seeds."""
    if not values:
        return "–"
    deviation = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):{sign}.1f}{deviation}"


def print_tables(found: dict[str, list[Run]], held_out: bool) -> None:
    columns = HELD_OUT_COLUMNS if held_out else COLUMNS
    for tier in TIERS:
        title = f"{tier} devices that {'never ' * held_out}trained"
        print(f"| {title} | {' | '.join(columns)} |\n| ---{' | ---' * len(columns)} |")
        for method, runs in found.items():
            owners = {"server": "global", "local": "alone"} if method == "none" else {"personal": method}
            for owner, name in owners.items():
                cells = make_cells(runs, found.get("none", []), owner, tier, held_out)
                print(f"| {name} | {' | '.join(cells[column] for column in columns)} |")
        print(flush=True)


def print_bytes() -> None:
    """Prints what a device of each tier sends in a round and direction, and what it keeps."""
    columns = [f"{tier}: {what}" for tier in TIERS for what in ("sent", "kept")]
    print(f"|  | {' | '.join(columns)} |\n| ---{' | ---' * len(columns)} |")
    for name in ("none", "finetune", "fedper", "fedrep", "fedbabu", "ditto", "perfedavg", "proto"):
        own = {"own": True, "devices": False}
        run = build_experiment(from_mapping({"personal": {"name": name}, "evaluation": own}, load_recipe("digits")))
        population, cells = run.population, list[str]()
        for tier, weights in run.server.items():
            kept = count_bytes(population.state_like(tier, weights))
            cells += [f"{count_down(population.wires[tier], weights):,}", f"{kept:,}"]
        print(f"| `{name}` | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--methods", default="")
    parser.add_argument("--out", type=Path, default=Path("runs/personal"))
    parser.add_argument("--bytes", action="store_true")
    options = parser.parse_args()
    if options.bytes:
        return print_bytes()
    chosen = [m for m in METHODS if not options.methods or m.partition(",")[0] in options.methods.split(",")]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    # Seed by seed, so that what is done of a benchmark that was stopped can be compared.
    runs = {(method, seed): train(options.out, method, seed, options.rounds) for seed in seeds for method in chosen}
    found = {method: [runs[method, seed] for seed in seeds] for method in chosen}
    for held_out in (False, True):
        print_tables(found, held_out)
    return None


if __name__ == "__main__":
    main()
