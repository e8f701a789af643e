"""The settings of bounded updates, differential privacy and played attacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedhen.config.setting import setting


@dataclass(frozen=True)
class PrivacyConfig:
    """How much a single device can change the model."""

    mechanism: Literal["none", "bounded"] = setting(
        "none", "bounded: the change of each device, over all weights that it holds, is shortened to the bound"
    )
    bound: float = setting(
        0.0, "S, largest norm of a device's change; 0: the median of the round's norms, for `bounded` only", least=0
    )


@dataclass(frozen=True)
class AttackConfig:
    """Devices that send bad updates on purpose, in simulations only."""

    kind: Literal["none", "shifted", "scaled", "reversed", "noisy", "label-flipped"] = setting(
        "none",
        "what bad devices do; shifted: they add `strength` to every weight; scaled: they multiply their change by it; "
        "reversed: by its negative; noisy: they add normal noise of this deviation; label-flipped: they train on "
        "class k as if it were the k-th last",
    )
    share: dict[str, float] = setting({}, "share of the devices of each tier that are bad; by default a tenth")
    strength: float = setting(10.0, "how strong the attack is", above=0)
