"""Commands of small runs that are killed and resumed. They differ in what is saved, and in how often."""

from __future__ import annotations

from support.tiny import TINY, as_options

SETTINGS = [
    *(*TINY, "data.limit=60", "devices.number=8", "devices.active=4"),
    *("runtime.engine=plain", "checkpoint.rounds=2"),
]
RUNS_TO_KILL = {
    "plain": ["checkpoint.rounds=1", "runtime.storage=disk"],
    "scaffold": ["local.name=scaffold", "checkpoint.rounds=3", "runtime.engine=fast"],
    "optimisers, coded": [
        *("training.optimizer=adamw", "training.lr=0.01", "training.optimizer_state=device"),
        *("server.optimizer=yogi", "server.lr=0.1", "runtime.engine=fast", "runtime.storage=disk"),
        *("wire.down=bf16", "wire.up=topk"),
    ],
    "private": [
        *("privacy.mechanism=central", "privacy.bound=0.5", "privacy.noise=0.2", "privacy.separation=2"),
        *("privacy.within=0.5", "evaluation.devices=false", "evaluation.every=20", "checkpoint.rounds=3"),
    ],
    "ditto": ["personal.name=ditto", "evaluation.every=60", "runtime.storage=disk", "checkpoint.rounds=3"],
    "fedrep": [
        *("personal.name=fedrep", "evaluation.own=true", "evaluation.devices=false", "evaluation.every=30"),
        *("local.name=feddyn", "runtime.engine=fast"),
    ],
    "by loss": ["devices.sampling=loss", "evaluation.every=3"],
}
"""Name -> settings."""


def run_command(rounds: int, *settings: str) -> list[str]:
    return ["run", "digits", "--rounds", str(rounds), *as_options([*SETTINGS, *settings])]
