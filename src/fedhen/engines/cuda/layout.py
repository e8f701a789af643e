"""The positions of a tier's learned weights in one flat vector, which the module's parameters are views of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Every weight starts at a multiple of this many elements, so that kernels can read many at once."""
LOW_PRECISION_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""Layers whose weights autocast would convert to bf16 in every step."""


@dataclass(frozen=True)
class Layout:
    """The positions of a module's learned weights. The first `low_size` elements also have a copy in bf16."""

    offsets: Mapping[str, int]
    """Weight -> the position of its first element."""
    shapes: Mapping[str, torch.Size]
    size: int
    low_size: int
    index: Tensor
    """For every element of the concatenated weights, its position in the vector."""

    def view(self, vector: Tensor, name: str) -> Tensor:
        """Returns a weight as a view of the vector. Weights of four dimensions have their channels last there."""
        shape, begin = self.shapes[name], self.offsets[name]
        part = vector[begin : begin + shape.numel()]
        if len(shape) != 4:
            return part.view(shape)
        n, channels, height, width = shape
        return part.view(n, height, width, channels).permute(0, 3, 1, 2)

    def gather(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Concatenates these weights."""
        return torch.cat([weights[name].reshape(-1) for name in self.shapes])

    def scatter(self, values: Tensor) -> Tensor:
        """Returns a vector with the elements of concatenated weights at their positions."""
        return values.new_zeros(self.size).index_copy_(0, self.index, values)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Returns the weights of a vector, as consecutive views of a new one."""
        parts = torch.split(vector.index_select(0, self.index), [shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


def make_layout(module: nn.Module, learned: Iterable[str], lower: bool) -> Layout:
    """Makes a layout for the learned parameters of a module. With `lower`, weights of products have a bf16 copy."""
    parameters = {name: p for name, p in module.named_parameters() if name in set(learned)}
    low = _find_low_precision(module) & parameters.keys() if lower else set()
    offsets, end, low_size = {}, 0, 0
    for name in sorted(parameters, key=lambda name: name not in low):
        offsets[name] = end
        end += -(-parameters[name].numel() // ALIGNMENT) * ALIGNMENT
        low_size = end if name in low else low_size
    shapes = {name: p.shape for name, p in parameters.items()}
    device = next(iter(parameters.values())).device
    unindexed = Layout(offsets, shapes, end, low_size, torch.empty(0))
    every = torch.arange(end, device=device)
    index = torch.cat([unindexed.view(every, name).reshape(-1) for name in shapes])
    return Layout(offsets, shapes, end, low_size, index)


def _find_low_precision(module: nn.Module) -> set[str]:
    """Returns the parameters that belong only to unmodified layers of products."""
    owners: dict[int, list[str]] = {}
    for path, layer in module.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            # A hook may compute the weight from others in every pass.
            own = type(layer) in LOW_PRECISION_LAYERS and not layer._forward_pre_hooks and name in ("weight", "bias")
            kept = own and parameter.dtype == torch.float32
            owners.setdefault(id(parameter), []).append(f"{path}.{name}".lstrip(".") if kept else "")
    return {names[0] for names in owners.values() if all(names)}
