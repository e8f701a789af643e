"""The settings of the machine, of checkpoints, and of how the server of a real fleet waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedhen.config.setting import setting

ACCELERATORS = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class RuntimeConfig:
    """How the machine is used. The number of workers changes no result; the other settings may change last digits."""

    engine: Literal["fast", "plain"] = setting(
        "fast", "fast: active devices train in parallel; plain: one after the other, as in the paper"
    )
    workers: int = setting(
        0,
        "on a CPU, number of processes that train devices and score models; 0: as many as the usable cores allow",
        least=0,
        most=1024,
    )
    precision: Literal["auto", "fp32", "tf32", "bf16"] = setting(
        "auto",
        "precision of products in training and scoring; weights are in full precision; auto: bf16 on a GPU, fp32 on a "
        "CPU",
    )
    storage: Literal["auto", "accelerator", "host", "disk"] = setting(
        "auto",
        "where the devices' last models and memories are kept; auto: on the accelerator if those of all devices fit a "
        "quarter of its free memory, else on the host if they fit half of its free memory, else on disk",
    )
    storage_dir: str = setting("", "folder for storage on disk; empty: the system's temporary folder")
    threads: int = setting(
        1,
        "torch threads of each worker; 0: one worker with a thread for each core",
        least=0,
        most=1024,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """When a run saves the state from which it can be resumed. No result depends on it."""

    minutes: float = setting(5.0, "minutes between checkpoints; 0: not by time", least=0)
    rounds: int = setting(
        0, "rounds between checkpoints; 0: not by rounds, and none at all if minutes is 0 too", least=0
    )

    @property
    def wanted(self) -> bool:
        """Whether checkpoints are saved: if so, also after the last round and when the run is stopped."""
        return bool(self.minutes or self.rounds)


@dataclass(frozen=True)
class FleetConfig:
    """How the server of a real fleet waits for its devices. Simulations ignore it."""

    deadline_seconds: float = setting(
        600.0, "seconds after which a round ends without the devices that have not answered", above=0
    )
    answers: int = setting(
        0, "number of answers that end a round; 0: as many as devices are asked, without the spare ones", least=0
    )
    spare_devices: int = setting(
        0, "devices that are asked in addition to `devices.active`, because some may not answer", least=0
    )
    wait_seconds: float = setting(300.0, "seconds to wait for all devices of the fleet before the first round", above=0)
    losses: bool = setting(
        False,
        "whether nodes report the losses of their training, for the progress and the records; with "
        "devices.sampling=loss they always do",
    )
