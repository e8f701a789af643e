"""Attacks on the digits: the accuracy of both models without and with bounded updates, over three seeds.

    python benchmarks/attacks.py [--only none shifted ...] [--bad 1 3] [--seeds 0 1 2]

20 devices with IID data, of which 10 are active in each of 25 rounds. One bad device is complex; of three bad devices
one is simple and two are complex. Every run is played in this process: about 25 minutes for all on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

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


def show(name: str, attack: AttackConfig, seeds: Sequence[int]) -> None:
    cells = []
    for defence in DEFENCES.values():
        found = [final_accuracies(configure(seed, attack, defence)) for seed in seeds]
        each = [f"{sum(tier) / len(tier):.1f} ({min(tier):.1f}–{max(tier):.1f})" for tier in zip(*found, strict=True)]
        cells.append(" / ".join(each))
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="attacks on the digits, without and with bounded updates")
    kinds = ["none", *(attack.kind for attack in ATTACKS)]
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="these attacks")
    parser.add_argument("--bad", nargs="+", type=int, choices=[*BAD], default=[*BAD], help="bad devices")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    print(f"simple / complex, mean (smallest–largest) over seeds {', '.join(map(str, options.seeds))}\n")
    print(f"| attack | {' | '.join(DEFENCES)} |\n|---|---|---|", flush=True)
    if "none" in options.only:
        show("none", AttackConfig(), options.seeds)
    for attack in ATTACKS:
        for number in options.bad if attack.kind in options.only else ():
            show(f"{attack.kind} {attack.strength:g}, {number}", replace(attack, share=BAD[number]), options.seeds)


if __name__ == "__main__":
    main()
