"""The modules in which devices train one after the other: each device starts with its tier's module as it was built."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedhen.models.image_layout import to_channels_last

KNOWN_LAYERS = ("torch.nn.modules.", "fedhen.models.preact_resnet", "fedhen.models.pooling", "fedhen.models.gpt")
"""Where layers are defined whose passes change nothing in them but saved weights and buffers."""


class Reused(NamedTuple):
    """A copy of a module, its weights and buffers, and the original's, in the same order."""

    module: nn.Module
    own: list[Tensor]
    initial: list[Tensor]


@dataclass
class ModuleCopies:
    """Gives every device a module, so that changes within a module do not reach the next device.

    A copy takes milliseconds. If nothing but weights can change in a module, one copy serves all devices.
    """

    build: Callable[[str], nn.Module]
    """Tier -> a new module, always with the same weights."""
    built: dict[str, nn.Module] = field(default_factory=dict)
    """Tier -> the module as it was built. No device trains in it."""
    reused: dict[str, Reused] = field(default_factory=dict)
    """Tier -> the copy that serves all devices."""

    def original(self, tier: str) -> nn.Module:
        """Returns the module as it was built."""
        if tier not in self.built:
            self.built[tier] = self.build(tier)
        return self.built[tier]

    def take(self, tier: str) -> nn.Module:
        """Returns a module like the original, until the next call."""
        original = self.original(tier)
        if tier in self.reused:
            module, own, initial = self.reused[tier]
            with torch.no_grad():
                torch._foreach_copy_(own, initial)
            return module
        try:
            copied = copy.deepcopy(original)
        except Exception:
            # Some modules cannot be copied, such as those with torch's older weight_norm.
            return self.build(tier)
        if changes_only_weights(original):
            self.reused[tier] = Reused(copied, _tensors(copied), _tensors(original))
        return copied


def changes_only_weights(module: nn.Module) -> bool:
    """Returns whether training changes only what the module saves: it has neither unknown layers nor users' hooks."""
    return not any(
        not type(layer).__module__.startswith(KNOWN_LAYERS)
        or "forward" in vars(layer)
        or layer._non_persistent_buffers_set
        or layer._forward_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or any(hook is not to_channels_last for hook in layer._forward_pre_hooks.values())
        for layer in module.modules()
    )


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
