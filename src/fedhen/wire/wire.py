"""The wire between the server and the devices of a tier: what is sent down and up, and what arrives.

Down go weights, rounded to bfloat16 if so configured. They follow from the server's model alone, so that a resumed
server sends the same, and nobody has to keep what a device saw last. Up goes the change from what the device received.
The server adds it to its own, unrounded weights: otherwise rounding on the way down would undo changes that are
smaller than a step of the rounding. If nothing is coded, models and updates are sent as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedhen.config.wire_settings import WireConfig
from fedhen.params import Shapes, Weights, count_bytes, unpack
from fedhen.wire.codecs import Codec, Draw, Int8, TopK, Whole
from fedhen.wire.layout import Layout, make_layout

REST = "residual/"
"""What a device keeps of a change has this before the weights' names."""


class Letter(NamedTuple):
    """What a device sends after its training, and what it keeps."""

    tensors: Weights
    """The named tensors that are sent."""
    kept: Weights
    """What it keeps for its next round, named `residual/NAME`; empty if the codec keeps nothing."""


class Wire(Protocol):
    """What is sent between the server and the devices of a tier.

    In all arguments `model` are weights with the names, shapes and types of the tier's; where not said, their values
    are not used.
    """

    @property
    def keeps_rest(self) -> bool:
        """Whether devices keep what they have not sent."""
        ...

    def send_down(self, model: Weights) -> Weights:
        """Returns the server's model as it is sent: tensors with the same names and shapes."""
        ...

    def receive_down(self, tensors: Weights, model: Weights) -> Weights:
        """Returns the model that a device starts from."""
        ...

    def send_up(self, trained: Weights, received: Weights, kept: Mapping[str, Tensor], draw: Draw) -> Letter:
        """Returns what a device sends after its training.

        Args:
            trained: Its weights after training.
            received: Its weights before training.
            kept: What it keeps between its rounds. Entries of other names are not used.
            draw: Random numbers that follow from the round and the device.
        """
        ...

    def receive_up(self, tensors: Weights, model: Weights) -> Weights:
        """Returns a device's weights as the server sees them; `model` is the server's model."""
        ...

    def up_like(self, model: Weights) -> Weights:
        """Returns tensors with the names, shapes and types of what a device sends. Their values are not used."""
        ...

    def kept_like(self, model: Mapping[str, Tensor]) -> Weights:
        """Returns tensors with the names, shapes and types of what a device keeps. Their values are not used."""
        ...

    def find_fault(self, tensors: Weights, model: Weights) -> str:
        """Returns why a device's tensors of the right names, shapes and types are malformed, or ""."""
        ...


class PlainWire:
    """Sends weights as they are, in both directions."""

    keeps_rest = False

    def send_down(self, model: Weights) -> Weights:
        return model

    def receive_down(self, tensors: Weights, model: Weights) -> Weights:
        return tensors

    def send_up(self, trained: Weights, received: Weights, kept: Mapping[str, Tensor], draw: Draw) -> Letter:
        return Letter(trained, {})

    def receive_up(self, tensors: Weights, model: Weights) -> Weights:
        return tensors

    def up_like(self, model: Weights) -> Weights:
        return model

    def kept_like(self, model: Mapping[str, Tensor]) -> Weights:
        return {}

    def find_fault(self, tensors: Weights, model: Weights) -> str:
        return ""


@dataclass
class CodedWire:
    """Sends weights rounded to a type, and changes as a codec writes them. Whole numbers are sent as they are."""

    down: Callable[[Tensor], Tensor]
    codec: Codec
    shallower: Sequence[Shapes]
    """What the shallower tiers of the pool hold, shallowest first."""
    layouts: dict[torch.device, Layout] = field(default_factory=dict)

    @property
    def keeps_rest(self) -> bool:
        return self.codec.keeps_rest

    def send_down(self, model: Weights) -> Weights:
        return {n: self.down(t) if t.is_floating_point() else t for n, t in model.items()}

    def receive_down(self, tensors: Weights, model: Weights) -> Weights:
        return {name: tensor.to(model[name].dtype) for name, tensor in tensors.items()}

    def send_up(self, trained: Weights, received: Weights, kept: Mapping[str, Tensor], draw: Draw) -> Letter:
        layout = self.layout(received)
        change = layout.pack(trained) - layout.pack(received)
        if self.keeps_rest and REST + layout.names[0] in kept:
            change += layout.pack({name: kept[REST + name] for name in layout.names})
        tensors, rest = self.codec.encode(change, layout, draw)
        others = {name: tensor for name, tensor in trained.items() if name not in layout.names}
        left = {} if rest is None else unpack(rest, {name: received[name] for name in layout.names})
        return Letter({**tensors, **others}, {REST + name: tensor for name, tensor in left.items()})

    def receive_up(self, tensors: Weights, model: Weights) -> Weights:
        layout = self.layout(model)
        change = unpack(self.codec.decode(tensors, layout), {name: model[name] for name in layout.names})
        return {n: t + change[n] if n in change else tensors[n] for n, t in model.items()}

    def up_like(self, model: Weights) -> Weights:
        layout = self.layout(model)
        return {**self.codec.like(layout), **{n: t for n, t in model.items() if n not in layout.names}}

    def kept_like(self, model: Mapping[str, Tensor]) -> Weights:
        if not self.keeps_rest:
            return {}
        return {REST + name: tensor for name, tensor in model.items() if tensor.is_floating_point()}

    def find_fault(self, tensors: Weights, model: Weights) -> str:
        return self.codec.find_fault(tensors, self.layout(model))

    def layout(self, model: Mapping[str, Tensor]) -> Layout:
        device = next(iter(model.values())).device
        if device not in self.layouts:
            self.layouts[device] = make_layout(model, self.shallower)
        return self.layouts[device]


def make_wires(
    config: WireConfig, holdings: Mapping[str, Shapes], pools: Sequence[tuple[str, ...]]
) -> Mapping[str, Wire]:
    """Returns the wire of each tier, from what the devices of each tier hold."""
    if not config.codes:
        return {tier: PlainWire() for tier in holdings}
    down: Mapping[str, Callable[[Tensor], Tensor]] = {"fp32": lambda tensor: tensor, "bf16": round_to_bf16}
    codecs: Mapping[str, Codec] = {
        "fp32": Whole(),
        "bf16": Whole(torch.bfloat16),
        "int8": Int8(),
        "topk": TopK(config.keep),
    }
    order, pool_of = list(holdings), {tier: pool for pool in pools for tier in pool}
    return {
        tier: CodedWire(
            down[config.down],
            codecs[config.up],
            [holdings[other] for other in order[: order.index(tier)] if other in pool_of[tier]],
        )
        for tier in holdings
    }


def round_to_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16)


def count_down(wire: Wire, model: Weights) -> int:
    """Returns the bytes of a model as it is sent to a device of the tier."""
    return count_bytes(wire.send_down({name: tensor.to("meta") for name, tensor in model.items()}))


def count_up(wire: Wire, model: Weights) -> int:
    """Returns the bytes of what a device of the tier sends."""
    return count_bytes(wire.up_like(model))
