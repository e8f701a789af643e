"""The files of a run folder.

config.toml        the complete configuration; `fedhen run --config` repeats the run from it
environment.json   versions and hardware, the task, and a checksum of the data
rounds.jsonl       one object per round: only what the seed determines
timing.jsonl       one object per round: seconds
errors.jsonl       the first hundred devices whose training raised an error, if any
summary.json       written last: a run that has it is finished
models/            the weights of each tier's server model and all-devices average (if it is kept), in safetensors:
                   those of the last round, and as best-... those of the best round if it is another one
exits.json         what early exits give, as `fedhen evaluate --exits` found it, for reports
fleet.json         which nodes were its devices, if a real fleet ran it
tracking.json      which trackers have logged it, and up to which round; tensorboard/ and wandb/ are theirs
private/           for the server only: the secret of a fleet's run and, with differential privacy, who took part in its
                   rounds and what they have spent
checkpoints/       everything that the next round needs; see experiment/checkpoint_files.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

RUNS = Path("runs")
"""The folder of all run folders, where the user names none."""
CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
ROUNDS = "rounds.jsonl"
TIMING = "timing.jsonl"
ERRORS = "errors.jsonl"
SUMMARY = "summary.json"
MODELS = "models"
EXITS = "exits.json"
FLEET = "fleet.json"
TRACKING = "tracking.json"
PRIVATE = "private"
SECRET, LEDGER = "secret", "ledger.json"
"""In `PRIVATE`: what the random streams follow from, and the releases of each stream of noise."""

MODEL_OWNERS = ("devices", "server")
"""Whose models are scored: the average of all devices' last models, which the paper reports, and the server's."""
SERVER, PERSONAL, LOCAL = "server", "personal", "local"
"""Whose models are scored on a device's own test data: the server's, the device's, one trained on its data alone."""
OWN_MODELS = "own models"
"""Where a record has this under `scored`, the server's scores are the means of the devices' own."""
BEST = "best"
MOMENTS = ("last", BEST)
"""Which models of a run there are: those of its last round, and those of the best round of each owner and tier."""


def reported_owner(scores: Mapping[str, Any]) -> str:
    """Returns whose scores are reported: the devices' if there are any, as in the paper, else the server's."""
    return next(owner for owner in MODEL_OWNERS if owner in scores)


def resume_command(folder: Path) -> str:
    return f"fedhen {'fleet run --resume' if (folder / FLEET).is_file() else 'resume'} {folder}"
