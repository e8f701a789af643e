"""Makes the files of an export in memory, target by target; nothing is named before it was checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedhen.deploy import executorch, onnx, onnx_cascade, quantize
from fedhen.deploy.capture import Captured
from fedhen.deploy.check import Reference
from fedhen.deploy.confidence import Confidence
from fedhen.deploy.manifest import InputRecord, MethodRecord
from fedhen.deploy.source import Source, TierModel, describe_inputs
from fedhen.deploy.split import Stage

CASCADE = "cascade"


@dataclass(frozen=True)
class Job:
    """A tier's model on its way into files."""

    model: TierModel
    source: Source
    captured: Captured
    reference: Reference
    stages: Sequence[Stage] = ()
    """Its stages, if a cascade is made of it."""
    confidence: Confidence | None = None
    threshold: float = 0.0
    int8: bool = False

    @property
    def what(self) -> str:
        return f"tier {self.model.tier!r}"

    @property
    def outputs(self) -> list[str]:
        return [f"logits_{exit}" for exit in self.model.exits]

    def inputs(self, batch: int = 0) -> list[InputRecord]:
        return describe_inputs(self.source.sample, batch)

    def about(self, outputs: Sequence[str]) -> dict[str, Any]:
        """Returns what a file says of itself."""
        source = self.source
        return {
            "tier": self.model.tier,
            "exits": list(self.model.exits),
            "outputs": list(outputs),
            "task": source.task.name,
            "classes": list(source.classes),
            "normalisation": {name: list(values) for name, values in source.normalisation.items()},
            "run": dict(source.run),
        }


@dataclass(frozen=True)
class Draft:
    """A file that is not written yet."""

    name: str
    kind: str
    content: bytes
    outputs: list[str]
    batch: int = 0
    methods: dict[str, MethodRecord] = field(default_factory=dict)
    quantisation: str = ""


def draft_onnx(job: Job) -> Iterator[Draft]:
    """Makes TIER.onnx with an output for each exit, the cascade, and both in int8 if that is asked for."""
    whole = onnx.make_model(job.captured, job.outputs)
    yield _onnx_draft(job, job.model.tier, "model", whole, job.outputs)
    results, stages = [onnx_cascade.LOGITS, onnx_cascade.EXIT], []
    if job.stages and job.confidence is not None:
        values = dict(zip(job.captured.inputs, job.captured.example, strict=True))
        stages = onnx.make_stages(job.stages, values, job.confidence, job.what)
        joined = onnx_cascade.join_stages(stages, job.stages, job.threshold)
        yield _onnx_draft(job, CASCADE, "cascade", joined, results)
    if not job.int8:
        return
    calibration = dict(zip(job.captured.inputs, job.source.calibration, strict=True))
    small = quantize.quantize(whole, _to_arrays(calibration), {})
    yield _onnx_draft(job, job.model.tier, "model", small, job.outputs, quantize.SCHEME)
    if stages:
        joined = onnx_cascade.join_stages(_quantize_stages(job, stages, calibration), job.stages, job.threshold)
        yield _onnx_draft(job, CASCADE, "cascade", joined, results, quantize.SCHEME)


def draft_executorch(job: Job) -> Iterator[Draft]:
    """Makes TIER.pte with the method `forward` and those that run its stages, and `forward` alone in int8."""
    methods, outputs = executorch.list_methods(job.captured, job.stages, job.confidence, job.model.exits)
    content = executorch.make_program(methods, job.what)
    yield Draft(f"{job.model.tier}.pte", "model", content, job.outputs, 1, outputs)
    if job.int8:
        columns = job.source.calibration
        examples = [[column[k : k + 1] for column in columns] for k in range(len(columns[0]))]
        content = executorch.make_int8_program(job.captured, examples, job.what)
        only = {"forward": outputs["forward"]}
        yield Draft(f"{job.model.tier}-int8.pte", "model", content, job.outputs, 1, only, executorch.SCHEME)


TARGETS: Mapping[str, Callable[[Job], Iterator[Draft]]] = {"onnx": draft_onnx, "executorch": draft_executorch}


def _onnx_draft(job: Job, stem: str, kind: str, model: Any, outputs: list[str], scheme: str = "") -> Draft:
    content = onnx.describe(model, job.about(outputs))
    return Draft(f"{stem}{'-int8' if scheme else ''}.onnx", kind, content, outputs, quantisation=scheme)


def _quantize_stages(job: Job, models: Sequence[Any], calibration: Mapping[str, Tensor]) -> list[Any]:
    """Returns the stages in int8, each calibrated on what the stages before it hand over."""
    found, values = [], dict(calibration)
    for model, stage in zip(models, job.stages, strict=True):
        taken = {value.name: values[value.name] for value in stage.takes}
        found.append(quantize.quantize(model, _to_arrays(taken), {value.name: value.axis for value in stage.takes}))
        values |= stage(values)[1]
    return found


def _to_arrays(values: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.contiguous().numpy() for name, tensor in values.items()}
