"""Joins the stages of a model to one ONNX file in which each example leaves at the first exit that is sure enough."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from fedhen.deploy.onnx import BATCH
from fedhen.deploy.split import Stage

Proto = Any
EXIT, LOGITS, THRESHOLD = "exit", "logits", "threshold"


def join_stages(models: Sequence[Proto], stages: Sequence[Stage], threshold: float) -> Proto:
    """Returns the cascade. Its inputs are the model's and `threshold`, its outputs `logits` and `exit`.

    After a stage, `Compress` selects the examples that are not sure enough, the next stage runs on them inside an `If`,
    and `ScatterND` puts its results back.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    joiner = _Joiner(models, stages)
    nodes = joiner.make_stage(0, {value.name: value.name for value in stages[0].takes})
    nodes += [helper.make_node("Identity", [f"stage0/{name}"], [name]) for name in (LOGITS, EXIT)]
    shape = [BATCH, *joiner.sizes[1:]]
    graph = helper.make_graph(
        nodes,
        "fedhen",
        [*models[0].graph.input, helper.make_tensor_value_info(THRESHOLD, TensorProto.FLOAT, [])],
        [
            helper.make_tensor_value_info(LOGITS, joiner.kind, shape),
            helper.make_tensor_value_info(EXIT, TensorProto.INT64, [BATCH]),
        ],
        [
            numpy_helper.from_array(np.array(threshold, np.float32), THRESHOLD),
            numpy_helper.from_array(np.array([0]), "first_axis"),
            *joiner.shared,
            *joiner.weights[0],
        ],
    )
    joined = helper.make_model(graph, opset_imports=_list_opsets(models), ir_version=models[0].ir_version)
    joined.producer_name, joined.producer_version = models[0].producer_name, models[0].producer_version
    onnx.checker.check_model(joined, full_check=True)
    return joined


class _Joiner:
    """Makes the nodes of the stages. Names of stage K begin with `stageK/`; its results are its logits and exit."""

    def __init__(self, models: Sequence[Proto], stages: Sequence[Stage]) -> None:
        self.models, self.stages = models, stages
        self.axes = {value.name: value.axis for stage in stages for value in (*stage.takes, *stage.gives)}
        typed = models[0].graph.output[0].type.tensor_type
        self.kind, self.sizes = typed.elem_type, [size.dim_value or None for size in typed.shape.dim]
        self.shared: list[Proto] = []
        self.renamed: dict[tuple[int, str], str] = {}
        self._share_weights()
        self.weights = [
            [_copy(tensor, f"stage{place}/{tensor.name}") for tensor in model.graph.initializer
             if (place, tensor.name) not in self.renamed]
            for place, model in enumerate(models)
        ]  # fmt: skip

    def make_stage(self, place: int, values: Mapping[str, str]) -> list[Proto]:
        """Returns the nodes of a stage and, inside them, of those after it. `values` are the names of what it takes."""
        from onnx import helper

        p, own = f"stage{place}/", {"logits": f"stage{place}/own_logits"}

        def rename(name: str) -> str:
            known = values.get(name) or own.get(name) or self.renamed.get((place, name))
            return known or (f"{p}{name}" if name else "")

        nodes = [_rename(node, rename) for node in self.models[place].graph.node]
        nodes += [
            helper.make_node("Shape", [f"{p}own_logits"], [f"{p}size"], start=0, end=1),
            helper.make_node("ConstantOfShape", [f"{p}size"], [f"{p}own_exit"], value=_tensor([place])),
        ]
        if place == len(self.stages) - 1:
            return nodes + [helper.make_node("Identity", [f"{p}own_{name}"], [f"{p}{name}"]) for name in (LOGITS, EXIT)]
        given = {value.name: f"{p}{value.name}" for value in self.stages[place].gives}
        return nodes + self._make_decision(place, {**values, **given})

    def _make_decision(self, place: int, values: Mapping[str, str]) -> list[Proto]:
        from onnx import TensorProto, helper

        p = f"stage{place}/"
        early = [helper.make_node("Identity", [f"{p}own_{name}"], [f"{p}early_{name}"]) for name in (LOGITS, EXIT)]
        branches = {
            "else_branch": helper.make_graph(early, f"{p}early", [], self._describe_results(f"{p}early_")),
            "then_branch": helper.make_graph(
                self._go_on(place, values), f"{p}late", [], self._describe_results(f"{p}late_"), self.weights[place + 1]
            ),
        }
        return [
            helper.make_node("GreaterOrEqual", [f"{p}confidence", THRESHOLD], [f"{p}sure"]),
            helper.make_node("Not", [f"{p}sure"], [f"{p}unsure"]),
            helper.make_node("Cast", [f"{p}unsure"], [f"{p}counted"], to=TensorProto.INT32),
            helper.make_node("ReduceMax", [f"{p}counted", "first_axis"], [f"{p}most"], keepdims=0),
            helper.make_node("Cast", [f"{p}most"], [f"{p}any"], to=TensorProto.BOOL),
            helper.make_node("If", [f"{p}any"], [f"{p}{LOGITS}", f"{p}{EXIT}"], **branches),
        ]

    def _go_on(self, place: int, values: Mapping[str, str]) -> list[Proto]:
        """Returns the nodes that run the next stages on the examples that are left."""
        from onnx import helper

        p, after = f"stage{place}/", f"stage{place + 1}/"
        needed = {value.name for stage in self.stages[place + 1 :] for value in stage.takes} & values.keys()
        taken = {name: f"{after}taken/{name}" for name in sorted(needed)}
        return [
            *(
                helper.make_node("Compress", [values[name], f"{p}unsure"], [new], axis=self.axes[name])
                for name, new in taken.items()
            ),
            *self.make_stage(place + 1, taken),
            helper.make_node("NonZero", [f"{p}unsure"], [f"{p}row"]),
            helper.make_node("Transpose", [f"{p}row"], [f"{p}rows"], perm=[1, 0]),
            *(
                helper.make_node("ScatterND", [f"{p}own_{name}", f"{p}rows", f"{after}{name}"], [f"{p}late_{name}"])
                for name in (LOGITS, EXIT)
            ),
        ]

    def _describe_results(self, prefix: str) -> list[Proto]:
        from onnx import TensorProto, helper

        return [
            helper.make_tensor_value_info(f"{prefix}{LOGITS}", self.kind, self.sizes),
            helper.make_tensor_value_info(f"{prefix}{EXIT}", TensorProto.INT64, [None]),
        ]

    def _share_weights(self) -> None:
        """Finds weights that several stages have: they are stored once, where every branch sees them."""
        found: dict[str, list[tuple[int, Proto]]] = defaultdict(list)
        for place, model in enumerate(self.models):
            for tensor in model.graph.initializer:
                content = _copy(tensor, "").SerializeToString(deterministic=True)
                found[sha256(content).hexdigest()].append((place, tensor))
        for copies in found.values():
            if len({place for place, _ in copies}) > 1:
                name = f"shared/{copies[0][1].name}/{len(self.shared)}"
                self.shared.append(_copy(copies[0][1], name))
                self.renamed |= {(place, tensor.name): name for place, tensor in copies}


def _rename(node: Proto, rename: Callable[[str], str]) -> Proto:
    from onnx import NodeProto

    copy = NodeProto()
    copy.CopyFrom(node)
    copy.name = ""
    copy.input[:] = [rename(name) for name in node.input]
    copy.output[:] = [rename(name) for name in node.output]
    return copy


def _copy(tensor: Proto, name: str) -> Proto:
    from onnx import TensorProto

    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    return copy


def _tensor(values: list[int]) -> Proto:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.array(values, np.int64))


def _list_opsets(models: Sequence[Proto]) -> list[Proto]:
    from onnx import helper

    versions = {opset.domain: opset.version for model in models for opset in model.opset_import}
    return [helper.make_opsetid(domain, version) for domain, version in sorted(versions.items())]
