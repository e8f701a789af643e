"""What a target costs on the digits, in rounds, bytes, time and energy, over five seeds.

    python benchmarks/costs.py [--seeds 0,1,2,3,4] [--out DIR] [--only methods,sampling,codecs-four-tiers]

Runs what is missing under --out, one run after the other in this process, and prints a Markdown table for each
question. Interrupted, it goes on where it was: what is finished is not run again. Every run ends when all tiers have
reached the target, or after --rounds. Time and energy are those of the shipped profiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import fedhen
from fedhen.config.recipes import load_recipe
from fedhen.profiles.reading import read_profile
from fedhen.reports import rounds_to_target
from fedhen.reports.participation import count_rounds
from fedhen.reports.spending import Pricing, price_runs
from fedhen.runs.reader import Run, read_run

TARGET = 85.0


@dataclass(frozen=True)
class Setting:
    """What is changed in a recipe."""

    method: str = "fedhen"
    recipe: str = "digits"
    changes: Mapping[str, Any] = field(default_factory=dict)


def compare_methods(recipe: str) -> dict[str, Setting]:
    methods = {name: Setting(name, recipe) for name in ("fedhen", "noside", "decouple", "heterofl")}
    return {**methods, "fedhen on a width nest": Setting("fedhen", recipe, {"model": {"nesting": "width"}})}


def compare_samplings(recipe: str, profile: str, deadline: float) -> dict[str, Setting]:
    def with_clock(sampling: str, deadline: float = 0.0) -> Setting:
        clock = {"profile": profile, "deadline_seconds": deadline}
        return Setting(recipe=recipe, changes={"devices": {"sampling": sampling}, "clock": clock})

    return {
        "uniform": Setting(recipe=recipe),
        "loss (power of choice)": Setting(recipe=recipe, changes={"devices": {"sampling": "loss"}}),
        "oort": with_clock("oort"),
        f"deadline of {deadline:g} s (FedCS)": with_clock("deadline", deadline),
    }


def compare_codecs(recipe: str) -> dict[str, Setting]:
    def coded(up: str) -> Setting:
        return Setting(recipe=recipe, changes={"wire": {"down": "bf16", "up": up}})

    return {
        "fp32": Setting(recipe=recipe),
        "bf16": coded("bf16"),
        "int8 up, bf16 down": coded("int8"),
        "top-k up, bf16 down": coded("topk"),
    }


QUESTIONS: dict[str, tuple[str, dict[str, Setting]]] = {
    "methods": ("phones", compare_methods("digits")),
    "four-tiers": ("phones", compare_methods("digits-4")),
    "sampling": ("phones", compare_samplings("digits", "phones", 2.0)),
    "sampling-mixed": ("mixed", compare_samplings("digits", "mixed", 0.5)),
    "sampling-four-tiers": ("phones", compare_samplings("digits-4", "phones", 2.0)),
    "sampling-four-tiers-mixed": ("mixed", compare_samplings("digits-4", "mixed", 0.5)),
    "codecs": ("phones", compare_codecs("digits")),
    "codecs-four-tiers": ("phones", compare_codecs("digits-4")),
}
"""Name -> the profile that prices the runs, and the rows of its table."""


def train(setting: Setting, seed: int, options: argparse.Namespace) -> Run:
    """Plays a run, unless it is there."""
    changes: dict[str, Any] = {name: {**values} for name, values in setting.changes.items()}
    flat = [f"{section}-{key}-{value}" for section, values in changes.items() for key, value in values.items()]
    folder = Path(options.out) / "_".join([setting.recipe, setting.method, *flat]) / f"seed{seed}"
    if not (folder / "summary.json").is_file():
        fedhen.run(
            setting.recipe,
            setting.method,
            run_dir=folder,
            overwrite=True,
            progress=False,
            accelerator="cpu",
            seed=seed,
            rounds=options.rounds,
            stop={"until": dict.fromkeys(load_recipe(setting.recipe).tiers, TARGET)},
            runtime={"workers": 1, "precision": "fp32"},
            checkpoint={"minutes": 0},
            **changes,
        )
        print(f"played {folder}", flush=True)
    return read_run(folder)


def spread(values: Sequence[float], decimals: int) -> str:
    """Mean ± sample standard deviation."""
    return f"{mean(values):.{decimals}f}" + (f" ± {stdev(values):.{decimals}f}" if len(values) > 1 else "")


def find_reached(run: Run, tiers: Sequence[str]) -> int | None:
    """Returns the round after which all these tiers have reached the target, or None."""
    reached = [rounds_to_target(run, tier, TARGET) for tier in tiers]
    return None if None in reached else max(number for number in reached if number is not None)


def count_bytes(run: Run, number: int, way: str) -> int:
    return sum(sum(record.bytes[way].values()) for record in run.rounds if record.round <= number)


def measure_evenness(pricing: Pricing) -> float:
    """Jain's index of the devices' merged updates: 1 if all have equally many, 1 / devices if one has all."""
    merged = count_rounds(pricing).merged
    counts = [merged[device] for device in range(len(pricing.tier_of))]
    return sum(counts) ** 2 / (len(counts) * sum(each**2 for each in counts))


def describe(priced: Sequence[Pricing], tiers: Sequence[str]) -> list[str]:
    """Returns the cells of a row: what it takes until all these tiers have reached the target."""
    reached = [find_reached(each.run, tiers) for each in priced]
    found = [(each, number) for each, number in zip(priced, reached, strict=True) if number is not None]
    if len(found) < len(priced):
        return [f"{len(found)} of {len(priced)} reached", "–", "–", "–", "–"]
    amounts: list[tuple[Callable[[Pricing, int], float], int]] = [
        (lambda each, number: number, 1),
        (lambda each, number: (count_bytes(each.run, number, "down") + count_bytes(each.run, number, "up")) / 1e6, 1),
        (lambda each, number: count_bytes(each.run, number, "up") / 1e6, 1),
        (lambda each, number: each.typical.seconds[number], 1),
        (lambda each, number: each.typical.joules[number], 1),
    ]
    return [spread([amount(each, number) for each, number in found], decimals) for amount, decimals in amounts]


def make_table(name: str, options: argparse.Namespace) -> str:
    """Plays what is missing for a question, and returns its table."""
    profile, settings = QUESTIONS[name]
    rows = []
    for label, setting in settings.items():
        runs = [train(setting, int(seed), options) for seed in options.seeds.split(",")]
        priced = list(price_runs(runs, read_profile(profile), print).values())
        tiers = runs[0].tiers
        evenness = [spread([measure_evenness(each) for each in priced], 2)] if "sampling" in name else []
        rows.append([label, *describe(priced, tiers[:1]), *describe(priced, tiers), *evenness])
    units = ("rounds", "MB", "MB up", "s", "J")
    head = ["", *(f"{part}: {unit}" for part in (tiers[0], "all") for unit in units), *["evenness"] * bool(evenness)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Plays what is missing, then prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", default="runs/costs")
    parser.add_argument("--only", default=",".join(QUESTIONS), help="these tables, with commas")
    options = parser.parse_args()
    tables = {name: make_table(name, options) for name in options.only.split(",")}
    for name, table in tables.items():
        print(f"\n### {name}: to {TARGET:g} %, by profile {QUESTIONS[name][0]}\n\n{table}", flush=True)


if __name__ == "__main__":
    main()
