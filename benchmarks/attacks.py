"""Attacks on the digits: the accuracy of both models without and with bounded updates, over three seeds.

    python benchmarks/attacks.py [--only none shifted ...] [--bad 1 3] [--seeds 0 1 2] [--results attacks.jsonl]

20 devices with IID data, of which 10 are active in each of 25 rounds. One bad device is complex; of three bad devices
one is simple and two are complex. Every run is played in this process: about 25 minutes for all on two cores. With
`--results`, each run is kept in the file when it ends, and runs that are there are not played again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedhen.config.privacy_settings import AttackConfig, PrivacyConfig
from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.experiment.build import build_experiment

ATTACKS = [
    AttackConfig("shifted", strength=1e6),
    AttackConfig("scaled", strength=10.0),
    AttackConfig("reversed", strength=10.0),
    AttackConfig("noisy", strength=1.0),
    AttackConfig("label-flipped"),
]
BAD = {1: {"simple": 0.0, "complex": 0.1}, 3: {"simple": 0.1, "complex": 0.2}}
DEFENCES = {"mean": PrivacyConfig(), "bounded": PrivacyConfig("bounded")}


def configure(seed: int, attack: AttackConfig, defence: PrivacyConfig) -> Config:
    config = load_recipe("digits")
    return replace(
        config,
        seed=seed,
        rounds=25,
        split=replace(config.split, kind="iid"),
        devices=replace(config.devices, active=10),
        evaluation=replace(config.evaluation, devices=False, every=25),
        privacy=defence,
        attack=attack,
    )


def final_accuracies(config: Config) -> list[float]:
    """Returns the accuracy of each model after the last round, in percent."""
    *_, last = build_experiment(config, accelerator="cpu").play()
    return [100 * value for value in last.record["accuracy"]["server"].values()]


@dataclass
class Results:
    """The accuracies of runs by name, kept in a file if there is one."""

    path: Path | None
    known: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self.known |= dict(json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines())

    def find(self, name: str, config: Config) -> list[float]:
        """Returns the accuracies of a run, which is played if it is not known."""
        if name not in self.known:
            self.known[name] = final_accuracies(config)
            if self.path is not None:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([name, self.known[name]]) + "\n")
        return self.known[name]


def show(name: str, attack: AttackConfig, seeds: Sequence[int], results: Results) -> None:
    cells = []
    for label, defence in DEFENCES.items():
        found = [results.find(f"{name}, {label}, {seed}", configure(seed, attack, defence)) for seed in seeds]
        each = [f"{sum(tier) / len(tier):.1f} ({min(tier):.1f}–{max(tier):.1f})" for tier in zip(*found, strict=True)]
        cells.append(" / ".join(each))
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="attacks on the digits, without and with bounded updates")
    kinds = ["none", *(attack.kind for attack in ATTACKS)]
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="these attacks")
    parser.add_argument("--bad", nargs="+", type=int, choices=[*BAD], default=[*BAD], help="bad devices")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--results", type=Path, help="the file in which runs are kept")
    options = parser.parse_args()
    results = Results(options.results)
    print(f"simple / complex, mean (smallest–largest) over seeds {', '.join(map(str, options.seeds))}\n")
    print(f"| attack | {' | '.join(DEFENCES)} |\n|---|---|---|", flush=True)
    if "none" in options.only:
        show("none", AttackConfig(), options.seeds, results)
    for attack in ATTACKS:
        for number in options.bad if attack.kind in options.only else ():
            bad = replace(attack, share=BAD[number])
            show(f"{attack.kind} {attack.strength:g}, {number}", bad, options.seeds, results)


if __name__ == "__main__":
    main()
