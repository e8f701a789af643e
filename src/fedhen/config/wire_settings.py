"""How models and updates are coded on their way between the server and the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedhen.config.setting import setting
from fedhen.config.training_settings import LocalConfig
from fedhen.errors import ConfigError

KEEP = 0.1
WITH_MEMORY = ("scaffold", "feddyn")
"""The local variants whose memory is a sum of what devices send, in full precision."""


@dataclass(frozen=True)
class WireConfig:
    """How models and updates are coded on their way, in simulations and in real fleets."""

    down: Literal["fp32", "bf16"] = setting(
        "fp32", "how the server sends models; fp32: as they are; bf16: rounded, in half the bytes"
    )
    up: Literal["fp32", "bf16", "int8", "topk"] = setting(
        "fp32",
        "how devices send what they changed; fp32: as it is; bf16: rounded; int8: rounded at random to 255 steps, with "
        "a scale for each tensor; topk: the largest changes only, while the device keeps the rest for its next round",
    )
    keep: float = setting(
        KEEP,
        "topk: share of the weights that are sent, counted apart for the weights of each shallower tier and the deeper"
        " ones",
        above=0,
        most=1,
    )

    @property
    def codes(self) -> bool:
        """Whether anything is coded."""
        return (self.down, self.up) != ("fp32", "fp32")


def check_wire(wire: WireConfig, local: LocalConfig) -> None:
    """Raises a ConfigError if a setting does not fit the codec."""
    if wire.keep != KEEP and wire.up != "topk":
        raise ConfigError(f"wire.keep has no effect with wire.up={wire.up}: set it to {KEEP}, or set wire.up to topk")
    if wire.codes and local.name in WITH_MEMORY:
        setting_name = f"wire.up={wire.up}" if wire.up != "fp32" else f"wire.down={wire.down}"
        raise ConfigError(
            f"local.name={local.name} does not work with {setting_name}: it adds up exact changes over the rounds; "
            "set it to fp32, or use local.name=fedprox"
        )
