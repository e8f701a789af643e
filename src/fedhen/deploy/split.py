"""Splits a captured graph at its exits into stages, so that a pass can end after any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from fedhen.deploy.capture import Captured, batch_axes, is_tensor
from fedhen.errors import FedhenError
from fedhen.models.operations import count_all

SIZE = torch.ops.aten.sym_size.int


@dataclass(frozen=True)
class Value:
    """A tensor that stages hand over."""

    name: str
    axis: int
    """The dimension that the examples are on."""


@dataclass(frozen=True)
class Stage:
    """What one exit computes beyond the exits before it."""

    module: nn.Module
    """It takes the tensors of `takes` and returns the exit's output, then the tensors of `gives`."""
    takes: tuple[Value, ...]
    gives: tuple[Value, ...] = ()

    def __call__(self, values: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the exit's output and the values that are handed over."""
        with torch.no_grad():
            output, *given = self.module(*(values[value.name] for value in self.takes))
        return output, {value.name: tensor for value, tensor in zip(self.gives, given, strict=True)}


class StageModule(nn.Module):
    """A stage as a module: it returns the exit's output, how sure it is if that is asked for, then what it gives."""

    def __init__(self, stage: Stage, confidence: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.stage, self.confidence = stage.module, confidence

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        output, *given = self.stage(*values)
        return (output, *([] if self.confidence is None else [self.confidence(output)]), *given)


def split(captured: Captured) -> list[Stage]:
    """Splits a graph into a stage for each of its outputs.

    A stage is all that its output depends on and no earlier one does. What it reads of earlier stages is handed over if
    its rows are the examples; else it is computed again, as sizes are.
    """
    return _Splitter(captured).split()


def shares_work(captured: Captured, stages: Sequence[Stage]) -> bool:
    """Returns whether every later stage reads what an earlier one has computed with weights.

    Exits that are nested by width do not: each is a pass of its own.
    """
    graph = captured.module.graph
    weights = set(captured.program.graph_signature.parameters)
    weighted: set[str] = set()
    for node in graph.nodes:
        if any(each.name in weighted or str(each.target) in weights for each in node.all_input_nodes):
            weighted.add(node.name)
    return all(any(value.name in weighted for value in stage.takes) for stage in stages[1:])


def count_stages(stages: Sequence[Stage], captured: Captured) -> list[int]:
    """Returns, for each exit, the operations of one example that leaves there."""
    values = {n: t[:1].contiguous() for n, t in zip(captured.inputs, captured.example, strict=True)}
    totals, total = [], 0
    for stage in stages:
        with torch.no_grad(), count_all() as counter, _CopyIfNeeded():  # type: ignore[no-untyped-call]
            values |= stage(values)[1]
        total += counter.get_total_flops()
        totals.append(total)
    return totals


class _CopyIfNeeded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a captured graph run with other kernels, whose results lie in memory in another order than a view needs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].reshape(args[1]) if func is torch.ops.aten.view.default else func(*args, **(kwargs or {}))


class _Splitter:
    def __init__(self, captured: Captured) -> None:
        self.root = captured.module
        self.inputs = [node for node in self.root.graph.nodes if node.op == "placeholder"]
        self.names = dict(zip(self.inputs, captured.inputs, strict=True))
        self.batch = self.inputs[0].meta["val"].shape[0]
        (outputs,) = self.root.graph.output_node().args
        self.outputs: list[Node] = list(outputs)  # type: ignore[arg-type]
        self.stage_of: dict[Node, int] = {}
        self.order = {node: place for place, node in enumerate(self.root.graph.nodes)}
        for stage, output in enumerate(self.outputs):
            for node in self._ancestors(output):
                self.stage_of.setdefault(node, stage)
        self.reads_inputs: set[Node] = set()
        for node in self.root.graph.nodes:
            if node.op == "placeholder" or (not self._is_size(node) and self.reads_inputs & set(node.all_input_nodes)):
                self.reads_inputs.add(node)

    def split(self) -> list[Stage]:
        plans = [self._plan(stage) for stage in range(len(self.outputs))]
        stages = []
        for place, (copied, taken) in enumerate(plans):
            later = {node for _, others in plans[place + 1 :] for node in others}
            given = self._sorted(n for n in later if n.op != "placeholder" and self.stage_of[n] == place)
            module = self._build(place, copied, taken, given)
            stages.append(Stage(module, tuple(map(self._value, taken)), tuple(map(self._value, given))))
        return stages

    def _plan(self, stage: int) -> tuple[set[Node], list[Node]]:
        """Returns the nodes that a stage computes and those that it takes."""
        copied, taken, open_nodes = set[Node](), set[Node](), [self.outputs[stage]]
        while open_nodes:
            node = open_nodes.pop()
            if node in copied or node in taken:
                continue
            earlier = self.stage_of[node] < stage
            if node.op == "placeholder" or (earlier and self._can_be_handed_over(node)):
                taken.add(node)
                continue
            copied.add(node)
            if not (earlier and self._is_batch_size(node)):
                open_nodes += node.all_input_nodes
        if not taken:
            taken.add(self.inputs[0])
        return copied, self._sorted(taken)

    def _build(self, stage: int, copied: set[Node], taken: Sequence[Node], given: Sequence[Node]) -> GraphModule:
        graph, made = Graph(), dict[Node, Node]()
        for node in taken:
            made[node] = graph.placeholder(f"taken_{node.name}")
        for node in self._sorted(copied):
            if self.stage_of[node] < stage and self._is_batch_size(node):
                made[node] = graph.call_function(SIZE, (made[taken[0]], self._value(taken[0]).axis))
            else:
                made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(made[node] for node in (self.outputs[stage], *given)))
        graph.lint()
        return GraphModule(self.root, graph)

    def _value(self, node: Node) -> Value:
        if node in self.names:
            return Value(self.names[node], 0)
        return Value(node.name, batch_axes(node.meta["val"], self.batch)[0])

    def _can_be_handed_over(self, node: Node) -> bool:
        """Returns whether a node is a tensor that depends on the inputs and has the examples on one dimension."""
        if not is_tensor(node) or node not in self.reads_inputs:
            return False
        if not any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape):
            raise FedhenError(f"the model cannot be split at its exits: {node.name} mixes the examples of a batch")
        symbolic = sum(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)
        return symbolic == 1 == len(batch_axes(node.meta["val"], self.batch))

    def _is_size(self, node: Node) -> bool:
        return isinstance(node.meta.get("val"), torch.SymInt | int)

    def _is_batch_size(self, node: Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.SymInt) and bool(value.node.expr == self.batch.node.expr)

    def _ancestors(self, node: Node) -> set[Node]:
        found, open_nodes = set[Node](), [node]
        while open_nodes:
            if (each := open_nodes.pop()) not in found:
                found.add(each)
                open_nodes += each.all_input_nodes
        return found

    def _sorted(self, nodes: Iterable[Node]) -> list[Node]:
        return sorted(nodes, key=self.order.__getitem__)
