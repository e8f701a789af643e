"""Writes ExecuTorch programs with XNNPACK, for one example at a time as a device has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedhen.deploy.capture import Captured, export_graph
from fedhen.deploy.confidence import Confidence
from fedhen.deploy.manifest import MethodRecord
from fedhen.deploy.quiet import quiet
from fedhen.deploy.split import Stage, StageModule
from fedhen.deploy.versions import require_executorch
from fedhen.errors import FedhenError, one_line

SCHEME = "XNNPACK: int8 weights by channel, int8 activations; what XNNPACK can quantise"
Method = tuple[nn.Module, Sequence[Tensor]]
"""A module that takes tensors, and one example for it."""


def name_stages(number: int) -> list[str]:
    """Returns the names of the methods that run the stages one by one."""
    return ["first", "rest"] if number == 2 else ["first", *(f"rest_{k}" for k in range(1, number))]


def list_methods(
    captured: Captured, stages: Sequence[Stage], confidence: Confidence | None, exits: Sequence[str]
) -> tuple[dict[str, Method], dict[str, MethodRecord]]:
    """Returns method -> its module and example, and method -> the names of what it takes and gives."""
    example = [tensor[:1].contiguous().clone() for tensor in captured.example]
    methods: dict[str, Method] = {"forward": (_Whole(captured.module), example)}
    records = {"forward": MethodRecord(list(captured.inputs), [f"logits_{exit}" for exit in exits])}
    if len(stages) < 2 or confidence is None:
        return methods, records
    values = dict(zip(captured.inputs, example, strict=True))
    for place, (name, stage) in enumerate(zip(name_stages(len(stages)), stages, strict=True)):
        last = place == len(stages) - 1
        methods[name] = (
            StageModule(stage, None if last else confidence),
            [values[value.name].contiguous().clone() for value in stage.takes],
        )
        taken, given = ([value.name for value in each] for each in (stage.takes, stage.gives))
        records[name] = MethodRecord(taken, ["logits", *([] if last else ["confidence"]), *given])
        values |= stage(values)[1]
    return methods, records


def make_program(methods: Mapping[str, Method], what: str) -> bytes:
    """Returns a program with these methods, which share their weights."""
    require_executorch()
    exported = {name: export_graph(module, example, None, what) for name, (module, example) in methods.items()}
    return _lower(exported)


def make_int8_program(captured: Captured, calibration: Iterable[Sequence[Tensor]], what: str) -> bytes:
    """Returns a program with the method `forward`, quantised to int8 and calibrated on single examples."""
    require_executorch()
    example = [tensor[:1].contiguous().clone() for tensor in captured.example]
    with quiet():
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    graph = export_graph(_Whole(captured.module), example, None, what).module(check_guards=False)
    try:
        with quiet(), torch.no_grad():
            quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
            prepared = prepare_pt2e(graph, quantizer)
            for inputs in calibration:
                prepared(*inputs)
            converted = convert_pt2e(prepared)
    except Exception as error:
        raise FedhenError(f"{what} cannot be quantised: {one_line(str(error))[:200]}") from error
    return make_program({"forward": (_Whole(converted), example)}, what)


class _Whole(nn.Module):
    """A graph as a module that takes tensors in order."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.whole = graph

    def forward(self, *tensors: Tensor) -> Any:
        return self.whole(*tensors)


def _lower(exported: Mapping[str, Any]) -> bytes:
    try:
        with quiet():
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower

            program = to_edge_transform_and_lower(dict(exported), partitioner=[XnnpackPartitioner()])
            return bytes(program.to_executorch().buffer)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise FedhenError(f"ExecuTorch cannot express the model: {one_line(lines[0])[:200]}") from error
