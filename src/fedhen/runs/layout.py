"""The files of a run folder.

config.toml        the complete configuration; `fedhen run --config` repeats the run from it
environment.json   versions and hardware
rounds.jsonl       one object a round: what the seed determines, and nothing else
timing.jsonl       one object a round: seconds
errors.jsonl       devices whose training raised, the first hundred of them; only where there are some
summary.json       written last: the run is finished if it is there
models/            the weights of each tier, server and all-devices average (if it is kept), in safetensors
fleet.json         which nodes were its devices; only where a real fleet played it
checkpoints/       all that the next round needs; see experiment/checkpoint_files.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG, ENVIRONMENT, ROUNDS, TIMING, ERRORS, SUMMARY, MODELS = (
    "config.toml",
    "environment.json",
    "rounds.jsonl",
    "timing.jsonl",
    "errors.jsonl",
    "summary.json",
    "models",
)


FLEET = "fleet.json"
"""In the folder of a run that a real fleet plays: the run's own name, and its devices."""


MODEL_OWNERS = ("devices", "server")
"""Whose models are scored: the average of all devices' last models, which the paper reports, and the server's."""


def reported_owner(scores: Mapping[str, Any]) -> str:
    """The owner that is reported, of those that were scored: what the paper reports if it is there."""
    return next(owner for owner in MODEL_OWNERS if owner in scores)


def resume_command(folder: Path) -> str:
    """The command that goes on with a run."""
    return f"fedhen {'fleet run --resume' if (folder / FLEET).is_file() else 'resume'} {folder}"
