"""Captures a module as a graph, for any number of examples, with its preprocessing in front."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node

from fedhen.data.inputs import Inputs, call_module, map_tensors
from fedhen.deploy.quiet import quiet
from fedhen.deploy.source import name_inputs, take_examples
from fedhen.errors import FedhenError, one_line

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
MAX_POOL = torch.ops.aten.max_pool2d.default


@dataclass(frozen=True)
class Captured:
    """A graph from tensors to the outputs of the exits; its batch dimension may have any size."""

    program: ExportedProgram
    inputs: tuple[str, ...]
    """The names of its inputs."""
    example: list[Tensor]
    """Two examples."""

    @property
    def module(self) -> GraphModule:
        """The graph as a module."""
        module = self.program.module(check_guards=False)
        assert isinstance(module, GraphModule)
        return module


class Flat(nn.Module):
    """A module whose inputs are tensors in order and whose outputs are a tuple, with the preprocessing in front."""

    def __init__(self, module: nn.Module, prepare: Callable[[Inputs], Inputs] | None, like: Inputs) -> None:
        super().__init__()
        # Exporters write to some modules, such as an LSTM.
        self.module = copy.deepcopy(module)
        self.prepare = prepare
        self.names = tuple(like) if isinstance(like, Mapping) else None
        self.single = isinstance(like, Tensor)
        self.dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs: Inputs = tensors[0] if self.single else tensors
        if self.names is not None:
            inputs = dict(zip(self.names, tensors, strict=True))
        inputs = inputs if self.prepare is None else self.prepare(inputs)
        inputs = map_tensors(inputs, lambda x: x.to(self.dtype) if x.is_floating_point() else x)
        outputs = call_module(self.module, inputs)
        # By place: outputs may be computed when they are read.
        return tuple(outputs[k] for k in range(len(outputs)))


def capture(
    module: nn.Module, sample: Inputs, prepare: Callable[[Inputs], Inputs] | None = None, what: str = "the model"
) -> Captured:
    """Captures a module on a sample. Raises a FedhenError if its forward depends on values or on the batch's size."""
    example = take_examples(sample, slice(2))
    if len(example[0]) < 2:
        example = [torch.cat([tensor, tensor])[:2] for tensor in example]
    program = export_graph(Flat(module, prepare, sample), example, [0] * len(example), what)
    return Captured(program, name_inputs(sample), example)


def export_graph(
    module: nn.Module, example: Sequence[Tensor], axes: Sequence[int] | None, what: str
) -> ExportedProgram:
    """Exports a module that takes tensors; `axes` names each one's batch dimension, None fixes all sizes."""
    sizes = None if axes is None else (tuple({axis: Dim("batch")} for axis in axes),)
    failures: list[Exception] = []
    # Tracing Python is faster, and gives up on some batch sizes that the analysis of its bytecode keeps open.
    for strict in (False, True):
        try:
            with quiet(), torch.no_grad():
                traced = torch.export.export(module, tuple(example), dynamic_shapes=sizes, strict=strict)
                program: ExportedProgram = traced.run_decompositions({})
        except Exception as error:
            failures.append(error)
            continue
        _fill_in_strides(program)
        return program
    raise FedhenError(_explain(failures[0], what))


def _explain(error: Exception, what: str) -> str:
    """Returns in one line why a module cannot be captured."""
    text = COLOURS.sub("", str(error))
    if "specialized" in text or "Constraints violated" in text:
        return f"{what} takes batches of 2 only: its forward writes the batch's size as a number; use x.flatten(1)"
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line for line in COLOURS.sub("", str(cause)).splitlines() if line.strip()]
    reason = lines[0] if lines else type(cause).__name__
    advice = ": its forward branches on values" if "data-dependent" in text else ""
    return f"{what} cannot be exported: {one_line(reason)[:200]}{advice}"


def _fill_in_strides(program: ExportedProgram) -> None:
    """Writes the stride of max-pooling that its kernel implies: some backends require it."""
    for node in program.graph.nodes:
        if node.target is MAX_POOL and (len(node.args) < 3 or not node.args[2]):
            node.args = (*node.args[:2], node.args[1], *node.args[3:])


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def batch_axes(value: Any, batch: Any) -> list[int]:
    """Returns the dimensions of a tensor whose size is the batch's."""
    return [
        axis
        for axis, size in enumerate(value.shape)
        if isinstance(size, torch.SymInt) and size.node.expr == batch.node.expr
    ]
