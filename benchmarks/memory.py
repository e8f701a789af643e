"""Measures a round as the population grows: seconds and peak memory for 100 and 10,000 devices, with 50 local steps.

    python benchmarks/memory.py [--accelerator cuda] [--devices 100,10000] [--storage auto] [--recipe NAME] [--json F]
    python benchmarks/memory.py --devices 100 --workers 1,2,8

Every population runs in a new process. The peak is that of the process and its workers together, with shared memory
counted once (Linux's PSS, read fifty times a second). Devices share examples if there are not enough, so that the data
is the same for all populations. Ten active devices take five steps each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

EPOCHS, EXAMPLES = 5, 50


def measure(options: argparse.Namespace, devices: int, workers: int) -> dict[str, Any]:
    """Plays the rounds of one population in this process."""
    import numpy as np
    import torch

    from fedhen import seeds
    from fedhen.config.recipes import load_recipe
    from fedhen.data import sources
    from fedhen.data.storage import data_root
    from fedhen.experiment.build import build_experiment

    recipe = load_recipe(options.recipe)
    config = replace(
        recipe,
        rounds=options.rounds,
        devices=replace(recipe.devices, number=devices, active=10),
        training=replace(recipe.training, epochs=EPOCHS, batch_size=EXAMPLES),
        evaluation=replace(recipe.evaluation, every=options.rounds),
        runtime=replace(recipe.runtime, storage=options.storage, engine=options.engine, workers=workers),
    )
    data = sources.load_data(config.data, data_root(options.data_dir), config.seed)
    stream = seeds.stream(config.seed, "split")
    pool = [np.sort(stream.choice(len(data.y), EXAMPLES, replace=False)) for _ in range(100)]
    data = data.split([pool[device % len(pool)] for device in range(devices)])
    began = time.perf_counter()
    experiment = build_experiment(config, data=data, accelerator=options.accelerator)
    assembled = time.perf_counter() - began
    seconds = [step.timing["train"] for step in experiment.play()]
    on_gpu = experiment.population.data.x.is_cuda
    return {
        "devices": devices,
        "workers": workers,
        "assembly_seconds": round(assembled, 3),
        "round_seconds": round(median(seconds[1:]), 4),
        "rows": len(experiment.last_models.rows),
        "gpu_mb": round(torch.cuda.max_memory_allocated() / 2**20, 1) if on_gpu else None,
    }


def memory_of(pid: int) -> int:
    """Returns the bytes of a process and its children, with each shared page counted once."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        own = next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except (OSError, StopIteration):
        return 0
    return own + sum(memory_of(int(child)) for child in children)


def watch(command: list[str]) -> dict[str, Any]:
    """Runs a command. Returns the JSON that it prints, with its peak memory."""
    process, most = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), 0
    while process.poll() is None:
        most = max(most, memory_of(process.pid))
        time.sleep(0.02)
    assert process.stdout is not None
    if process.returncode:
        raise SystemExit(process.returncode)
    return {**json.loads(process.stdout.read()), "host_mb": round(most / 2**20, 1)}


def main() -> None:
    """Starts one process for each population, then prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="100,10000")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--recipe", default="digits")
    parser.add_argument("--storage", default="auto")
    parser.add_argument("--engine", default="fast")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", default="0", help="0: as many as there are cores")
    parser.add_argument("--alone", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure(options, *options.alone)))
        return
    found = []
    for devices, workers in product(options.devices.split(","), options.workers.split(",")):
        found.append(watch([sys.executable, __file__, *sys.argv[1:], "--alone", devices, workers]))
    print("| devices | workers | s to set up | s a round | rows kept | peak host MB | peak GPU MB |")
    print("|---|---|---|---|---|---|---|")
    for each in found:
        keys = ("devices", "workers", "assembly_seconds", "round_seconds", "rows", "host_mb", "gpu_mb")
        print(f"| {' | '.join(str(each[key]) for key in keys)} |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
