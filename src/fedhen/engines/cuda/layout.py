"""Where the learned weights of a tier lie in one flat vector, and how a module reads them from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Every weight begins at a multiple of this many numbers: products read them in wide steps."""
LOW_PRECISION_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""Layers whose weights autocast would turn to bf16 in every step."""


@dataclass(frozen=True)
class Layout:
    """The learned weights of a module, one after the other; the leading ones have a copy in bf16."""

    offsets: Mapping[str, int]
    """Weight -> where it begins."""
    shapes: Mapping[str, torch.Size]
    size: int
    low_size: int
    """How many numbers, from the first on, have the copy."""
    index: Tensor
    """For every number of the weights in their own order: its place in the vector."""

    def view(self, vector: Tensor, name: str) -> Tensor:
        """A weight in the vector; four dimensions lie there with the channels last, as convolutions read them."""
        shape, begin = self.shapes[name], self.offsets[name]
        part = vector[begin : begin + shape.numel()]
        if len(shape) != 4:
            return part.view(shape)
        n, channels, height, width = shape
        return part.view(n, height, width, channels).permute(0, 3, 1, 2)

    def gather(self, weights: Mapping[str, Tensor]) -> Tensor:
        """These weights in their own order, one after the other."""
        return torch.cat([weights[name].reshape(-1) for name in self.shapes])

    def scatter(self, values: Tensor) -> Tensor:
        """A vector with these numbers, given in the weights' own order, in their places."""
        return values.new_zeros(self.size).index_copy_(0, self.index, values)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """The weights out of a vector, as consecutive views of a new one."""
        parts = torch.split(vector.index_select(0, self.index), [shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


def make_layout(module: nn.Module, learned: Iterable[str], lower: bool) -> Layout:
    """A layout for the learned parameters of a module, in the order of its parameters."""
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
    """Parameters that plain layers of products own, and nobody else."""
    owners: dict[int, list[str]] = {}
    for path, layer in module.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            # Without hooks: a weight that is made of others in every pass is not what is read here.
            own = type(layer) in LOW_PRECISION_LAYERS and not layer._forward_pre_hooks and name in ("weight", "bias")
            kept = own and parameter.dtype == torch.float32
            owners.setdefault(id(parameter), []).append(f"{path}.{name}".lstrip(".") if kept else "")
    return {names[0] for names in owners.values() if all(names)}
