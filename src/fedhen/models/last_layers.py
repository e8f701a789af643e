"""The last layer of each exit: the innermost module that returns the exit's output, and the features that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from fedhen.data.inputs import Inputs, call_module


class LastLayer(NamedTuple):
    """The last layer of an exit."""

    name: str
    """Of the module."""
    features: Tensor
    """What it was given."""


def find_last_layers(module: nn.Module, inputs: Inputs) -> list[LastLayer | None]:
    """Returns the last layer of each exit, shallowest first; None if the output of an exit is of no such module."""
    with record_calls(module) as calls:
        outputs = list(call_module(module, inputs))
    return [next((LastLayer(name, given) for name, given, out in calls if out is output), None) for output in outputs]


@contextmanager
def record_calls(module: nn.Module) -> Iterator[list[tuple[str, Tensor, Any]]]:
    """Records the name, the first input and the output of each module that is called within it, innermost first."""
    calls: list[tuple[str, Tensor, Any]] = []

    def hook_for(name: str) -> Any:
        def hook(layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            if given and isinstance(given[0], Tensor) and isinstance(output, Tensor):
                calls.append((name, given[0], output))

        return hook

    handles = [each.register_forward_hook(hook_for(name)) for name, each in module.named_modules() if name]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
