"""Inputs of models: a tensor, or a mapping or tuple of tensors that have one row for each example."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedhen.errors import DataError

Inputs = Any
"""What a model is given: a tensor, a mapping or a tuple of tensors. The first dimension is the examples.

Not a union of the three: whoever has data knows which one it is, and would have to check it at every use.
"""


def call_module(module: nn.Module, inputs: Inputs) -> Any:
    """Calls a module: with one tensor, with a keyword argument for each of a mapping, or with each of a tuple."""
    if isinstance(inputs, Tensor):
        return module(inputs)
    return module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)


def map_tensors(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Returns the inputs with every tensor changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {name: change(tensor) for name, tensor in inputs.items()}
    return tuple(change(tensor) for tensor in inputs)


def list_tensors(inputs: Inputs) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, Mapping) else inputs)


def take(inputs: Inputs, index: Tensor | slice) -> Inputs:
    """Returns some examples."""
    return map_tensors(inputs, lambda tensor: tensor[index])


def count_examples(inputs: Inputs) -> int:
    return len(list_tensors(inputs)[0])


def shape_of(inputs: Inputs) -> tuple[int, ...]:
    """Returns the shape of one input; of several tensors, that of the first."""
    return tuple(list_tensors(inputs)[0].shape[1:])


def shapes_of(inputs: Inputs) -> Any:
    """Returns the shape of one input, or of each of several, by name or in order."""
    if isinstance(inputs, Mapping):
        return {name: tuple(tensor.shape[1:]) for name, tensor in inputs.items()}
    return shape_of(inputs) if isinstance(inputs, Tensor) else [tuple(tensor.shape[1:]) for tensor in inputs]


def describe(inputs: Inputs) -> str:
    """Returns names, shapes and types of one example in words."""

    def each(tensor: Tensor) -> str:
        return f"shape {tuple(tensor.shape[1:])} and type {str(tensor.dtype).removeprefix('torch.')}"

    if isinstance(inputs, Tensor):
        return each(inputs)
    named = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    return ", ".join(f"{name} of {each(tensor)}" for name, tensor in named)


def have_same_form(a: Inputs, b: Inputs) -> bool:
    """Returns whether inputs have the same names and, example by example, the same shapes."""
    one, other = shapes_of(a), shapes_of(b)
    return bool(one == other) and (not isinstance(one, dict) or list(one) == list(other))


def concatenate(parts: Sequence[Inputs]) -> Inputs:
    """Returns the examples of several inputs of the same form."""
    columns = [torch.cat(tensors) for tensors in zip(*map(list_tensors, parts), strict=True)]
    first = parts[0]
    if isinstance(first, Tensor):
        return columns[0]
    return dict(zip(first, columns, strict=True)) if isinstance(first, Mapping) else tuple(columns)


def read_inputs(values: object) -> Inputs:
    """Makes inputs from arrays: one, a mapping of several by name, or a tuple of several."""
    if isinstance(values, Mapping):
        found: Inputs = {str(name): read_tensor(each, f"inputs {name!r}") for name, each in values.items()}
    elif isinstance(values, tuple) and values and all(hasattr(each, "shape") for each in values):
        found = tuple(read_tensor(each, f"inputs {place}") for place, each in enumerate(values))
    else:
        return read_tensor(values, "inputs")
    lengths = {len(tensor) for tensor in list_tensors(found)}
    if not lengths:
        raise DataError("the inputs are an empty mapping: name at least one array")
    if len(lengths) > 1:
        each = ", ".join(f"{name!r} has {len(t)}" for name, t in _named(found))
        raise DataError(f"the inputs have unequal lengths: {each} examples")
    return found


def read_tensor(values: object, kind: str) -> Tensor:
    """Makes a tensor of an array of numbers. `kind` says in errors what it is."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        cells = np.asarray(values, object)
        if cells.size and isinstance(cells.flat[0], str):
            raise DataError(f"the {kind} are text: number them from 0 (class_names=[...] names classes)") from None
        raise DataError(f"the {kind} are not an array of numbers: {str(error).splitlines()[0]}") from None
    if not tensor.dim():
        raise DataError(f"the {kind} are a single number: pass an array")
    return tensor


def _named(inputs: Inputs) -> list[tuple[object, Tensor]]:
    return list(inputs.items()) if isinstance(inputs, Mapping) else list(enumerate(list_tensors(inputs)))
