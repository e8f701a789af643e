"""Writes captured graphs as ONNX: one file a tier with an output for each exit, and a cascade of its stages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedhen.deploy.capture import Captured, export_graph
from fedhen.deploy.confidence import Confidence
from fedhen.deploy.quiet import quiet
from fedhen.deploy.split import Stage, StageModule
from fedhen.deploy.versions import require_onnx
from fedhen.errors import FedhenError, one_line

OPSET = 18
"""Old runtimes read it, and group norms are faster than with the one operator that opset 21 has for them."""
BATCH = "batch"
Proto = Any
"""onnx.ModelProto; the package is imported only where it is needed."""


def make_model(captured: Captured, outputs: Sequence[str]) -> Proto:
    """Returns a captured graph as an ONNX model with these names of its outputs."""
    return _convert(captured.program, captured.inputs, outputs)


def make_stages(
    stages: Sequence[Stage], values: Mapping[str, Tensor], confidence: Confidence, what: str
) -> list[Proto]:
    """Returns each stage as an ONNX model whose inputs and outputs have the names of the values.

    `values` are the inputs of two examples.
    """
    found, values = [], dict(values)
    for place, stage in enumerate(stages):
        example = [values[value.name].contiguous().clone() for value in stage.takes]
        last = place == len(stages) - 1
        module = StageModule(stage, None if last else confidence)
        program = export_graph(module, example, [value.axis for value in stage.takes], what)
        outputs = ["logits", *([] if last else ["confidence"]), *(value.name for value in stage.gives)]
        found.append(_convert(program, [value.name for value in stage.takes], outputs))
        values |= stage(values)[1]
    return found


def describe(model: Proto, about: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a model with its description, under one key so that they are always the same."""
    entry = model.metadata_props.add()
    entry.key, entry.value = "fedhen", json.dumps(about)
    return bytes(model.SerializeToString(deterministic=True))


def _convert(program: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Proto:
    require_onnx()
    import onnx
    from onnx.inliner import inline_local_functions

    try:
        with quiet():
            converted = torch.onnx.export(program, opset_version=OPSET, verbose=False)
            assert converted is not None
            model = inline_local_functions(converted.model_proto)
            _strip(model)
            _name_ends(model.graph, inputs, outputs)
            onnx.checker.check_model(model, full_check=True)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        # The exporter's text begins with how to report it.
        cause = str(error.__cause__ or "").strip().splitlines()
        raise FedhenError(f"ONNX cannot express the model: {one_line((cause or lines or ['?'])[0])[:200]}") from error
    return model


def _strip(model: Proto) -> None:
    """Removes the traces of this machine, and names the batch dimension."""
    graph = model.graph
    model.doc_string, graph.doc_string, graph.name = "", "", "fedhen"
    for props in (model.metadata_props, graph.metadata_props):
        del props[:]
    del graph.value_info[:]
    for each in (*graph.node, *graph.initializer, *graph.input, *graph.output):
        del each.metadata_props[:]
        each.doc_string = ""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g") or attribute.graphs:
                raise FedhenError("ONNX cannot express the model: it has a graph inside a graph")
    for value in (*graph.input, *graph.output):
        for size in value.type.tensor_type.shape.dim:
            if re.fullmatch(r"s\d+", size.dim_param):
                size.dim_param = BATCH


def _name_ends(graph: Proto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Gives inputs and outputs their names; inner values that have one of them are renamed."""
    from onnx import helper

    ends = {value.name for value in (*graph.input, *graph.output)}
    names = {name: f"{name}/inner" for name in {*inputs, *outputs} - ends}
    names |= {value.name: name for value, name in zip(graph.input, inputs, strict=True)}
    for value, name in zip(graph.output, outputs, strict=True):
        if value.name in names:  # an input, or the same value as another output
            graph.node.append(helper.make_node("Identity", [value.name], [f"{name}/same"]))
            names[f"{name}/same"] = name
        else:
            names[value.name] = name
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for value, name in (*zip(graph.input, inputs, strict=True), *zip(graph.output, outputs, strict=True)):
        value.name = name
