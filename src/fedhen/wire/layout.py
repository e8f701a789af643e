"""Where the floating weights of a tier's model lie in one vector, and which of them shallower tiers hold too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhen.params import Shapes, Weights, pack, packed_type, take_corner


@dataclass(frozen=True)
class Layout:
    """The floating weights of a tier, one behind the other in the order of the model."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    type: torch.dtype
    """Of the vector: one that holds the types of all weights."""
    device: torch.device
    groups: tuple[Tensor, ...]
    """The places of the elements that the shallowest tier holds, of those that only deeper tiers hold, and so on."""

    @property
    def number(self) -> int:
        """The length of the vector."""
        return sum(self.sizes)

    def pack(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Returns the floating weights as one vector."""
        return pack({name: weights[name] for name in self.names}).to(self.type)

    def split(self, vector: Tensor) -> Sequence[Tensor]:
        """Returns the parts of a vector that belong to the weights."""
        return torch.split(vector, list(self.sizes))

    def spread(self, each: Tensor) -> Tensor:
        """Returns a vector in which a number for each weight stands in all its elements."""
        return each.repeat_interleave(torch.tensor(self.sizes, device=each.device), output_size=self.number)

    def empty(self, number: int, kind: torch.dtype) -> Tensor:
        return torch.empty(number, dtype=kind, device=self.device)


def make_layout(model: Mapping[str, Tensor], shallower: Sequence[Shapes]) -> Layout:
    """Returns the layout of a model; `shallower` are the shapes of the pool's shallower tiers, shallowest first."""
    floating = {name: tensor for name, tensor in model.items() if tensor.is_floating_point()}
    device = next(iter(model.values())).device
    labels = label_elements(floating, shallower).to(device)
    groups = ((labels == number).nonzero().flatten() for number in range(len(shallower) + 1))
    return Layout(
        names=tuple(floating),
        sizes=tuple(tensor.numel() for tensor in floating.values()),
        type=packed_type(floating),
        device=device,
        groups=tuple(group for group in groups if len(group)),
    )


def label_elements(weights: Weights, shallower: Sequence[Shapes]) -> Tensor:
    """Returns, for each element of the vector, the number of the first of these tiers that holds it."""
    labels = []
    for name, tensor in weights.items():
        found = torch.full(tensor.shape, len(shallower), dtype=torch.int16)
        for number, shapes in reversed(list(enumerate(shallower))):
            if name in shapes:
                take_corner(found, map(min, shapes[name], tensor.shape)).fill_(number)
        labels.append(found.flatten())
    return torch.cat(labels) if labels else torch.zeros(0, dtype=torch.int16)
