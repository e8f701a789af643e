"""The settings of bounded updates, differential privacy and played attacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedhen.config.setting import setting


@dataclass(frozen=True)
class PrivacyConfig:
    """How much a single device can change the model, and how much the model can tell of it."""

    mechanism: Literal["none", "bounded", "central"] = setting(
        "none",
        "bounded: the change of each device, over all weights that it holds, is shortened to the bound; "
        "central: differential privacy, the server also adds noise to every weight",
    )
    bound: float = setting(
        0.0, "S, largest norm of a device's change; 0: the median of the round's norms, for `bounded` only", least=0
    )
    noise: float = setting(
        0.0, "central: z, the deviation of the noise in units of the bound; 0: none, and no promise", least=0
    )
    delta: float = setting(0.0, "central: δ of the promise; 0: 1 / devices^1.1, at most 0.01", least=0, below=1)
    budget: float = setting(
        0.0,
        "central: ε at which the run stops, before the round that would pass it; 0: none; it may change on resume",
        least=0,
    )
    accountant: Literal["rdp", "pld"] = setting(
        "rdp",
        "central: how ε is computed with sampling at random; rdp: a simple upper bound; pld: tight and slower, "
        "needs fedhen[dp]",
    )
    separation: int = setting(
        1, "central: b, a device takes part at most once in any b rounds in a row; above 1 the noise is banded", least=1
    )
    within: float = setting(
        0.0,
        "central: the bound follows the norms, so that this share of the changes is within it (Andrew et al. 2019); "
        "0: the bound stays as it is",
        least=0,
        below=1,
    )
    within_rate: float = setting(0.2, "how fast the bound follows", above=0)

    @property
    def is_private(self) -> bool:
        """Whether nothing that is published may say anything exact of devices' data."""
        return self.mechanism == "central"


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
