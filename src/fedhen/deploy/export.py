"""Exports trained models to files that devices run. A file has its name only after it was run and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from fedhen.deploy import check
from fedhen.deploy.capture import capture
from fedhen.deploy.card import make_card
from fedhen.deploy.cascade import NOTHING_SHARED, ONE_EXIT
from fedhen.deploy.confidence import CONFIDENCES
from fedhen.deploy.drafts import TARGETS, Draft, Job
from fedhen.deploy.exit_study import choose_threshold, study_exits
from fedhen.deploy.manifest import (
    CARD,
    FORMAT,
    MANIFEST,
    NEVER,
    Cascade,
    ExitStudy,
    FileRecord,
    Manifest,
    read_manifest,
    read_threshold,
)
from fedhen.deploy.out_folder import COMMAND, writing
from fedhen.deploy.runtime import ExecutorchSession, open_session
from fedhen.deploy.source import Source, TierModel
from fedhen.deploy.split import count_stages, shares_work, split
from fedhen.deploy.versions import find_version, require_executorch, require_onnx
from fedhen.errors import unknown_name
from fedhen.fileio.atomic import replace_file, write_json, write_text
from fedhen.models.operations import count_operations
from fedhen.runs.folders import Words
from fedhen.version import VERSION

PACKAGES = {"onnx": ("torch", "onnx", "onnxscript", "onnxruntime"), "executorch": ("torch", "executorch", "torchao")}
REQUIRE = {"onnx": require_onnx, "executorch": require_executorch}


def export_models(
    source: Source,
    out: Path,
    *,
    to: str = "onnx",
    tier: str | None = None,
    int8: bool = False,
    threshold: float | str | None = None,
    tolerance: float = 1.0,
    overwrite: bool = False,
    words: Words = COMMAND,
) -> Manifest:
    """Writes models as files for devices, each checked in its runtime, with a manifest and a model card.

    If anything fails, nothing is left.

    Args:
        source: The models and what they are checked on.
        out: A folder that does not exist or is empty.
        to: "onnx" or "executorch".
        tier: The only tier to export. By default all are.
        int8: Whether to write int8 files beside those in float.
        threshold: The cascade's: a number from 0 to 1, "never", or "auto". By default 0.9.
        tolerance: How many points an int8 file may score below the model.
        overwrite: Whether to replace the export that is in `out`.
        words: What error messages call the arguments.
    """
    if to not in TARGETS:
        raise unknown_name("target", to, TARGETS)
    REQUIRE[to]()
    known = [model.tier for model in source.models]
    if tier is not None and tier not in known:
        raise unknown_name("tier", tier, known)
    if threshold not in (None, "auto"):
        read_threshold(threshold)
    if int8:
        _ = source.calibration
    models = [model for model in source.models if tier in (None, model.tier)]
    with writing(out, overwrite, words) as folder:
        manifest = _export(source, models, folder, to, int8, threshold, tolerance)
        write_text(folder / CARD, make_card(manifest))
        write_json(folder / MANIFEST, manifest.to_dict())
        read_manifest(folder)  # as whoever opens the export will read it
    return manifest


def _export(
    source: Source,
    models: Sequence[TierModel],
    folder: Path,
    to: str,
    int8: bool,
    threshold: float | str | None,
    tolerance: float,
) -> Manifest:
    files: list[FileRecord] = []
    cascade, why = None, ""
    for model in models:
        job = _make_job(source, model, int8)
        if model is models[-1]:
            job, cascade, why = _cut(job, threshold)
        for draft in TARGETS[to](job):
            files.append(_write(job, draft, folder, to, tolerance))
    return Manifest(
        format=FORMAT,
        versions={"fedhen": VERSION, **{name: find_version(name) for name in PACKAGES[to]}},
        run={name: str(value) for name, value in source.run.items()},
        task=source.task.name,
        metric=source.task.scores[0].name,
        classes=list(source.classes),
        mean=list(source.normalisation.get("mean", [])),
        std=list(source.normalisation.get("std", [])),
        columns=list(source.spec.inputs[0].columns) if source.spec else [],
        unit=source.spec.unit if source.spec else "",
        examples="test" if source.has_test else "random",
        operations={model.tier: _count(source, model) for model in models},
        cascade=cascade,
        no_cascade=why,
        files=files,
    )


def _make_job(source: Source, model: TierModel, int8: bool) -> Job:
    module = model.module.cpu().eval()
    model = replace(model, module=module)
    captured = capture(module, source.sample, source.prepare, f"tier {model.tier!r}")
    return Job(model, source, captured, check.make_reference(model, source), int8=int8)


def _cut(job: Job, threshold: float | str | None) -> tuple[Job, Cascade | None, str]:
    """Splits a model for a cascade, or says why there is none."""
    confidence = CONFIDENCES.get(job.source.task.name)
    if len(job.model.exits) < 2:
        return job, None, f"the model of {job.what} {ONE_EXIT}"
    if confidence is None:
        return job, None, f"the task {job.source.task.name!r} has no confidence: there is no cascade"
    stages = split(job.captured)
    if not shares_work(job.captured, stages):
        return job, None, f"the model is {NOTHING_SHARED}"
    study: ExitStudy | None = None
    if job.source.has_test and job.source.targets is not None:
        operations = dict(zip(job.model.exits, count_stages(stages, job.captured), strict=True))
        study = study_exits(job.source.task, job.reference.outputs, job.source.targets, operations, confidence)
    chosen, rule = choose_threshold(threshold, study)
    job = replace(job, stages=stages, confidence=confidence, threshold=chosen)
    return job, Cascade(threshold=chosen, rule=rule, study=study), ""


def _write(job: Job, draft: Draft, folder: Path, to: str, tolerance: float) -> FileRecord:
    """Writes a file, reads it back, and compares what it computes with the model."""
    path = folder / draft.name
    check.check_paths(draft.content, draft.name)
    replace_file(path, draft.content)
    content, exact = path.read_bytes(), not draft.quantisation
    session = open_session(content, draft.name, to)
    reference = job.reference
    if draft.kind == "cascade":
        assert job.confidence is not None
        thresholds = list(dict.fromkeys((job.threshold, 0.0, NEVER)))
        agreement, found = check.check_cascade(session, reference, job.confidence, thresholds, draft.name, exact)
        expected, names = reference.leave_early(job.confidence, job.threshold), ["cascade"]
    else:
        agreement, found = check.check_model(session, reference, draft.name, exact, draft.batch)
        expected, names = reference.outputs, list(job.model.exits)
        if len(draft.methods) > 1:
            methods = {name: ExecutorchSession(content, draft.name, name) for name in list(draft.methods)[1:]}
            check.check_stages(methods, draft.methods, reference, draft.name)
    own, model = (reference.score(outputs, len(found[0]), names) for outputs in (found, expected))
    if not exact:
        check.check_loss(own, model, reference, agreement.same, tolerance, draft.name)
    return FileRecord(
        name=draft.name,
        kind=draft.kind,
        tier=job.model.tier,
        target=to,
        bytes=len(content),
        sha256=sha256(content).hexdigest(),
        exits=list(job.model.exits),
        inputs=job.inputs(draft.batch),
        outputs=draft.outputs,
        methods=draft.methods,
        quantisation=draft.quantisation,
        agreement=agreement,
        score=own,
        score_of_model=model,
        weights=job.model.sha256,
    )


def _count(source: Source, model: TierModel) -> int:
    prepared = source.sample if source.prepare is None else source.prepare(source.sample)
    return count_operations(model.module, prepared)
