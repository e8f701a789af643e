"""Turns a module into one that computes the logits of several devices at once, each with weights of its own.

Activations are (batch, devices, ...), weights (devices, ...). The module is traced; layers that have a rule of their
own become one operation over all devices, and everything else goes through `torch.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from fedhen.runtimes.stack_convolutions import BY_TAP, products
from fedhen.runtimes.stack_rules import ELEMENTWISE, PER_CHANNEL, Rule, layer_rule, mean, with_weights

Order = tuple[int, ...]


@dataclass(frozen=True)
class Stacked:
    """A module of several devices."""

    forward: Callable[[Mapping[str, Tensor], Tensor], list[Tensor]]
    """(weights by name, inputs) -> the logits of every exit."""
    orders: Mapping[str, Order] = field(default_factory=dict)
    """For some weights, in which order it wants their dimensions, the devices first."""

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        """A weight of all devices, as it is named, in the order that `forward` wants."""
        return tensor.permute(self.orders[name]).contiguous() if name in self.orders else tensor

    def named(self, name: str, tensor: Tensor) -> Tensor:
        """The other way."""
        if name not in self.orders:
            return tensor
        return tensor.permute([self.orders[name].index(k) for k in range(tensor.dim())])


LEAKS = "its embedding would look for unknown rows at the next device"
"""As `torch.vmap` does."""
WEIGHT, ACTIVATION = 0, 1
"""Where the devices are among the dimensions of a value."""


def mapped(module: nn.Module, sample: Tensor) -> Stacked:
    """The whole module through `torch.vmap`."""
    if any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in module.modules()):
        raise ValueError(LEAKS)

    def one(weights: dict[str, Tensor], x: Tensor) -> list[Tensor]:
        return list(functional_call(module, weights, (x,)))

    every = torch.vmap(one, in_dims=(WEIGHT, ACTIVATION), out_dims=ACTIVATION)
    return Stacked(lambda weights, x: list(every(dict(weights), x)))


def traced(module: nn.Module, sample: Tensor) -> Stacked:
    """The module node by node; a module that cannot be traced raises whatever it likes."""
    graph = fx.symbolic_trace(module)
    shapes = _Shapes(graph)
    shapes.run(sample)
    return _Translation(graph, shapes.found).stacked()


class _Shapes(fx.Interpreter):
    """The shape of every value on one device; none where it is not a tensor."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.found: dict[fx.Node, torch.Size | None] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run it, and note what came out."""
        value = super().run_node(n)
        self.found[n] = value.shape if isinstance(value, Tensor) else None
        return value


@dataclass(frozen=True)
class _Step:
    """One operation: the places of the values that it takes, and of the one that it gives."""

    run: Callable[..., Any]
    takes: tuple[int, ...]
    gives: int


class _Translation:
    """From the nodes of a traced module to operations over all devices."""

    def __init__(self, graph: fx.GraphModule, shapes: Mapping[fx.Node, torch.Size | None]) -> None:
        self.graph, self.shapes = graph, shapes
        self.parameters = dict(graph.named_parameters(remove_duplicate=False))
        self.places: dict[fx.Node | str, int] = {}
        self.kinds: dict[fx.Node, int | None] = {}
        """Where each value has its devices; none where it is the same for all."""
        self.steps: list[_Step] = []
        self.constants: dict[int, Any] = {}
        self.orders: dict[str, Order] = {}

    def stacked(self) -> Stacked:
        """All operations in a row."""
        begin, ends = 0, list[int]()
        for node in self.graph.graph.nodes:
            if node.op == "placeholder" and not self.kinds:
                begin, self.kinds[node] = self._place(node), ACTIVATION
            elif node.op == "placeholder":
                # An input beside the examples has its default.
                self.constants[self._place(node)], self.kinds[node] = node.args[0], None
            elif node.op == "get_attr":
                self._attribute(node)
            elif node.op == "output":
                ends = [self._place(logits) for logits in node.args[0]]
            else:
                self._operation(node)
        named = [(place, name) for name, place in self.places.items() if isinstance(name, str)]
        constants, steps = dict(self.constants), tuple(self.steps)

        def forward(weights: Mapping[str, Tensor], x: Tensor) -> list[Tensor]:
            values: dict[int, Any] = {**constants, begin: x}
            for place, name in named:
                values[place] = weights[name]
            for step in steps:
                values[step.gives] = step.run(*[values[place] for place in step.takes])
            return [values[place] for place in ends]

        return Stacked(forward, self.orders)

    def _place(self, value: fx.Node | str) -> int:
        return self.places.setdefault(value, len(self.places))

    def _attribute(self, node: fx.Node) -> None:
        name = str(node.target)
        if name in self.parameters:
            self.kinds[node] = WEIGHT
            self.steps.append(_Step(lambda weight: weight, (self._place(name),), self._place(node)))
        else:
            self.kinds[node] = None
            owner, _, attribute = name.rpartition(".")
            self.constants[self._place(node)] = getattr(self.graph.get_submodule(owner), attribute)

    def _operation(self, node: fx.Node) -> None:
        layer = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        names = [] if layer is None else [name for name, _ in layer.named_parameters()]
        kinds = [*(self.kinds[value] for value in node.all_input_nodes), *[WEIGHT] * len(names)]
        kind = max((k for k in kinds if k is not None), default=None)
        one = _on_one_device(node, layer, names)
        if self.shapes[node] is None:
            # A shape or the like, which is the same on every device.
            run, kind = _on_the_first(one, kinds), None
        elif kind is None:
            run = one
        else:
            rule = self._rule(node, layer)
            if rule is None and (isinstance(layer, nn.Embedding | nn.EmbeddingBag) or node.target is F.embedding):
                raise ValueError(LEAKS)
            run = rule or torch.vmap(one, in_dims=tuple(kinds), out_dims=kind)
        self.kinds[node] = kind
        read: list[fx.Node | str] = [*node.all_input_nodes, *(f"{node.target}.{name}" for name in names)]
        takes = tuple(self._place(value) for value in read)
        self.steps.append(_Step(run, takes, self._place(node)))

    def _rule(self, node: fx.Node, layer: nn.Module | None) -> Rule | None:
        """The node's own rule, if there is one for it as it is called here."""
        inputs, more = node.all_input_nodes, node.args[1:]
        if node.op == "call_function" and node.target in ELEMENTWISE:
            return self._elementwise(node)
        shape = self.shapes[inputs[0]] if inputs else None
        if shape is None or self.kinds[inputs[0]] != ACTIVATION or len(inputs) > 1 or node.args[:1] != (inputs[0],):
            return None
        if layer is not None:
            return self._product(node, layer, shape) or layer_rule(layer, shape)
        if node.target in PER_CHANNEL and len(shape) == 4:
            pool = PER_CHANNEL[node.target]
            return lambda x: pool(x, *more, **node.kwargs)
        if node.op == "call_method" and node.target == "mean":
            return mean(*more, **node.kwargs)
        return None

    def _product(self, node: fx.Node, layer: nn.Module, shape: torch.Size) -> Rule | None:
        """A convolution that wants its kernel in another order, which it may have if nobody else reads it."""
        if type(layer) is not nn.Conv2d or self._readers(layer.weight) > 1:
            return None
        rule = products(layer, shape)
        if rule is not None:
            self.orders[f"{node.target}.weight"] = BY_TAP
        return rule

    def _readers(self, parameter: Tensor) -> int:
        names = {name for name, p in self.parameters.items() if p is parameter}
        owners = {name.rpartition(".")[0] for name in names}
        return sum(
            node.target in (names if node.op == "get_attr" else owners)
            for node in self.graph.graph.nodes
            if node.op in ("get_attr", "call_module")
        )

    def _elementwise(self, node: fx.Node) -> Rule | None:
        """Weights are lined up with the activations' own dimensions; then the devices are one dimension more."""
        values = [(self.kinds[v], len(self.shapes[v] or ())) for v in node.all_input_nodes]
        call = _on_one_device(node, None, [])
        if len(values) == 1:
            return call
        (rank, *others) = {rank for kind, rank in values if kind == ACTIVATION} or {0}
        if others or any(kind is None or (kind == WEIGHT and own >= rank) for kind, own in values):
            return None
        missing = [rank - 1 - own if kind == WEIGHT else 0 for kind, own in values]
        return with_weights(call, missing) if any(missing) else call


def _on_one_device(node: fx.Node, layer: nn.Module | None, names: Sequence[str]) -> Callable[..., Any]:
    """The node as a function of its input nodes' values and of its layer's weights."""
    inputs = node.all_input_nodes
    # A view that a device's own layout allows may need a copy where devices lie between each other.
    target = "reshape" if node.op == "call_method" and node.target == "view" else node.target
    if layer is None and callable(target) and node.args == tuple(inputs):
        return partial(target, **node.kwargs)

    def run(*values: Any) -> Any:
        found = dict(zip(inputs, values[: len(inputs)], strict=True))
        args: Any = fx.map_arg(node.args, found.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, found.__getitem__)
        if layer is not None:
            return functional_call(layer, dict(zip(names, values[len(inputs) :], strict=True)), args, kwargs)
        if callable(target):
            return target(*args, **kwargs)
        return getattr(args[0], str(target))(*args[1:], **kwargs)

    return run


def _on_the_first(run: Callable[..., Any], kinds: Sequence[int | None]) -> Callable[..., Any]:
    return lambda *values: run(
        *(v if kind is None else v.select(kind, 0) for v, kind in zip(values, kinds, strict=True))
    )
