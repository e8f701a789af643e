"""Finds what a pass through a module runs, and removes the rest from a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor, nn

from fedhen.models.family import find_reached_weights


@dataclass
class Used:
    """What passes through a module run."""

    called: set[str] = field(default_factory=set)
    """Modules whose pass began."""
    finished: set[str] = field(default_factory=set)
    """Modules whose pass ended."""
    reached: set[str] = field(default_factory=set)
    """Weights that the outputs depend on."""
    outputs: Sequence[Tensor] = ()

    def has(self, path: str) -> bool:
        """Returns whether a module, or a part of it, is used."""
        inside = f"{path}."
        return any(name == path or name.startswith(inside) for name in self.called | self.reached)


def find_used(module: nn.Module, run: Callable[[], Sequence[Tensor]]) -> Used:
    """Finds what passes in both modes use: some layers run in training only."""
    used = Used()
    with ExitStack() as hooks:
        # A layer with several names has all of them.
        for name, layer in module.named_modules(remove_duplicate=False):
            hooks.callback(layer.register_forward_pre_hook(_note(used.called, name)).remove)
            hooks.callback(layer.register_forward_hook(_note(used.finished, name)).remove)
        for mode in (True, False):
            module.train(mode)
            used.outputs = list(run())
            used.reached |= set().union(*find_reached_weights(module, used.outputs))
    return used


def keep_only(module: nn.Module, used: Used, path: str = "") -> None:
    """Removes what is not used: the last items of a list, the weights of other layers."""
    if path not in used.finished:
        for name in list(module._parameters):
            if join(path, name) not in used.reached:
                module._parameters[name] = None
    for name, child in reversed(list(module._modules.items())):
        if child is not None and used.has(join(path, name)):
            keep_only(child, used, join(path, name))
        elif isinstance(module, nn.ModuleList | nn.Sequential) and name == list(module._modules)[-1]:
            # A model that goes through its list stops at its end.
            del module._modules[name]
        elif child is not None and any(True for _ in (*child.parameters(), *child.buffers())):
            # Layers without weights stay: some are read and not called, like the rate of a dropout.
            module._modules[name] = nn.Identity()


def join(path: str, name: str) -> str:
    """Returns the name of a part of a module."""
    return f"{path}.{name}" if path else name


def _note(names: set[str], name: str) -> Callable[..., None]:
    return lambda *_: names.add(name)
