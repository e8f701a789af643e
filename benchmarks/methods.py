"""Every method on the digits: rounds to target, final accuracy and bytes, over five seeds.

    python benchmarks/methods.py [--tiers 2,4] [--splits iid,dirichlet] [--seeds 0,1,2,3,4] [--methods fedhen,noside]
                                 [--out DIR] [--jobs N] [--accelerator cuda]

Runs what is missing under --out, as many processes at a time as there are cores, and prints one Markdown table for each
setting. What is finished is not run again. With --json FILE the numbers behind the tables are written there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

from fedhen.config.recipes import load_recipe
from fedhen.reports import rounds_to_target
from fedhen.runs.reader import Run, read_run

TARGET = 85.0
METHODS: dict[str, list[str]] = {
    "fedhen": ["--method", "fedhen"],
    "noside": ["--method", "noside"],
    "decouple": ["--method", "decouple"],
    "side-apart": ["--method", "side-apart"],
    "heterofl": ["--method", "heterofl"],
    "fedavg": ["--method", "fedavg"],
    "fedavg + fedprox": ["--method", "fedavg", "--local", "fedprox"],
    "fedavg + scaffold": ["--method", "fedavg", "--local", "scaffold"],
    "fedavg + feddyn": ["--method", "fedavg", "--local", "feddyn"],
    "fedhen + fedprox": ["--method", "fedhen", "--local", "fedprox"],
    "fedhen + scaffold": ["--method", "fedhen", "--local", "scaffold"],
    "fedhen + feddyn": ["--method", "fedhen", "--local", "feddyn"],
    "fedhen + distillation": ["--method", "fedhen", "--set", "objective.distillation=0.1"],
    "fedhen on a width nest": ["--method", "fedhen", "--set", "model.nesting=width"],
}
RECIPES = {"2": "digits", "4": "digits-4"}
SPLITS = {"iid": "IID", "dirichlet": "Dirichlet, α = 0.3"}


def train(options: argparse.Namespace, recipe: str, split: str, method: str, seed: int) -> Path:
    """One run, unless it is there."""
    folder = Path(options.out) / recipe / split / method.replace(" ", "") / f"seed{seed}-{options.rounds}rounds"
    if not (folder / "summary.json").is_file():
        what = [
            recipe,
            *METHODS[method],
            "--set",
            f"split.kind={split}",
            "--seed",
            str(seed),
            "--rounds",
            str(options.rounds),
        ]
        how = ["--run-dir", str(folder), "--overwrite", "--quiet", "--accelerator", options.accelerator]
        how += ["--set", "runtime.workers=1", "--set", "runtime.precision=fp32"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-m", "fedhen", "run", *what, *how], check=True, env=environment, stdout=subprocess.DEVNULL
        )
    return folder


def spread(values: list[float], decimals: int) -> str:
    """Mean ± sample standard deviation."""
    return f"{mean(values):.{decimals}f}" + (f" ± {stdev(values):.{decimals}f}" if len(values) > 1 else "")


def cells(runs: list[Run], tiers: list[str]) -> list[str]:
    """A method's row: for each tier rounds to target and final accuracy, and the bytes of the whole run."""
    row = []
    for tier in tiers:
        if tier not in runs[0].tiers:
            row += ["–", "–"]
            continue
        reached = [n for run in runs if (n := rounds_to_target(run, tier, TARGET)) is not None]
        whole = len(reached) == len(runs)
        row.append(spread([float(n) for n in reached], 1) if whole else f"{len(reached)} of {len(runs)} reached")
        row.append(spread([100 * run.curve(tier)[-1][1] for run in runs], 1))
    return [*row, f"{mean(sum(run.bytes_sent[run.rounds[-1].round].values()) for run in runs) / 1e6:.0f}"]


def table(rows: dict[str, list[str]], tiers: list[str]) -> str:
    """Markdown."""
    head = [
        "method",
        *(f"{tier}: {what}" for tier in tiers for what in (f"rounds to {TARGET:g} %", "final, %")),
        "MB sent",
    ]
    lines = [head, ["---"] * len(head), *([name, *row] for name, row in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Run what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiers", default="2,4")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", default="runs/methods")
    parser.add_argument("--methods", help="only these rows, with commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--splits", default=",".join(SPLITS))
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu", help="in fp32 on both")
    parser.add_argument("--json")
    options = parser.parse_args()
    recipes = [RECIPES[number] for number in options.tiers.split(",")]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    methods = options.methods.split(",") if options.methods else list(METHODS)
    splits = options.splits.split(",")
    places = list(itertools.product(recipes, splits, methods, seeds))
    with ThreadPoolExecutor(options.jobs) as pool:
        folders = dict(zip(places, pool.map(lambda place: train(options, *place), places), strict=True))
    found = {}
    for recipe, split in itertools.product(recipes, splits):
        runs = {m: [read_run(folders[recipe, split, m, seed]) for seed in seeds] for m in methods}
        tiers = sorted({t for each in runs.values() for t in each[0].tiers}, key=list(load_recipe(recipe).tiers).index)
        rows = {method: cells(each, tiers) for method, each in runs.items()}
        found[f"{recipe} {split}"] = rows
        print(f"\n### {recipe}, {SPLITS[split]}\n\n{table(rows, tiers)}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
