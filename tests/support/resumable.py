"""Commands of small runs to be killed and resumed: what is saved and how often differs."""

from __future__ import annotations

SMALL = {
    "data.limit": "60",
    "devices.number": "8",
    "devices.active": "4",
    "training.epochs": "1",
    "model.widths": "[4, 4, 8, 8]",
    "runtime.engine": "plain",
    "checkpoint.rounds": "2",
}
KINDS = {
    "plain": {"checkpoint.rounds": "1", "runtime.storage": "disk"},
    "scaffold": {"local.name": "scaffold", "checkpoint.rounds": "3", "runtime.engine": "fast"},
    "by loss": {"devices.sampling": "loss", "evaluation.every": "3"},
}


def run(rounds: int, **changes: str) -> list[str]:
    settings = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    return [
        "run",
        "digits",
        "--rounds",
        str(rounds),
        *(f"--set={key}={value}" for key, value in settings.items()),
    ]
