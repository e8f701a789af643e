"""What the noise of differential privacy leaves of the accuracy on the digits: the table of `fedhen privacy`.

    python benchmarks/private_digits.py [--noise 0 0.1 0.25 0.5 1 2] [--seeds 0 1]

The recipe `digits` with each of its 20 devices drawn with probability 1/2, and changes bounded to 0.5. Ten devices are
too few for any promise: what counts is the noise relative to the number of active devices, which more devices lower.
Adds its rows to `src/fedhen/privacy/digits.json`: about 6 minutes for all on two cores.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from fedhen.config.privacy_settings import PrivacyConfig
from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.experiment.build import build_experiment
from fedhen.fileio.atomic import write_json

TABLE = Path(__file__).parent.parent / "src/fedhen/privacy/digits.json"
BOUND, ACTIVE = 0.5, 10


def configure(seed: int, noise: float) -> Config:
    config = load_recipe("digits")
    return replace(
        config,
        seed=seed,
        devices=replace(config.devices, active=ACTIVE, sampling="bernoulli"),
        evaluation=replace(config.evaluation, devices=False, every=config.rounds),
        privacy=PrivacyConfig("central", bound=BOUND, noise=noise),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="what the noise of differential privacy leaves of the accuracy")
    parser.add_argument("--noise", nargs="+", type=float, default=[0.0, 0.1, 0.25, 0.5, 1.0, 2.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    options = parser.parse_args()
    for noise in options.noise:
        found: dict[str, list[float]] = {}
        for seed in options.seeds:
            *_, last = build_experiment(configure(seed, noise), accelerator="cpu").play()
            for tier, accuracy in last.record["accuracy"]["server"].items():
                found.setdefault(tier, []).append(round(100 * accuracy, 1))
        print(f"noise {noise:g}: {found}", flush=True)
        add_row({"noise": noise, **found}, options.seeds)


def add_row(row: dict[str, object], seeds: list[int]) -> None:
    """Writes the table with this row, in the place of one with the same noise."""
    rows = json.loads(TABLE.read_text())["rows"] if TABLE.is_file() else []
    rows = sorted([*(each for each in rows if each["noise"] != row["noise"]), row], key=lambda each: each["noise"])
    config = configure(0, 0.0)
    about = {"source": "benchmarks/private_digits.py", "recipe": config.recipe, "rounds": config.rounds}
    write_json(TABLE, {**about, "active": ACTIVE, "bound": BOUND, "seeds": seeds, "rows": rows})


if __name__ == "__main__":
    main()
