"""The model card of an export, for people: README.md beside the files."""

from __future__ import annotations

from collections.abc import Iterable

from fedhen.deploy.manifest import NEVER, FileRecord, InputRecord, Manifest, ThresholdRow


def make_card(manifest: Manifest) -> str:
    """Returns the card as Markdown."""
    run = manifest.run
    lines = [
        f"# {run.get('recipe', 'A model')}: files for devices",
        "",
        f"Trained with fedhen {manifest.versions.get('fedhen', '')}: "
        + ", ".join(f"{name} {value}" for name, value in run.items() if value)
        + ".",
        "",
        *_describe_inputs(manifest),
        "",
        "## Files",
        "",
        *_table(
            ["file", "bytes", "exits", f"{manifest.metric} of the file", "of the model", "largest difference", "same"],
            (_file_row(manifest, file) for file in manifest.files),
        ),
        "",
        f"Every file was loaded in its runtime and compared with the model on {_describe_examples(manifest)} before it "
        "was named. `manifest.json` has checksums, tolerances and all numbers.",
        "",
        *_describe_cascade(manifest),
        "## Made with",
        "",
        ", ".join(f"{name} {value}" for name, value in manifest.versions.items()) + ".",
    ]
    return "\n".join(lines) + "\n"


def _describe_inputs(manifest: Manifest) -> list[str]:
    file = manifest.files[0]
    lines = [f"- input `{each.name}`: {_describe_input(each)}" for each in file.inputs]
    if manifest.mean or manifest.std:
        lines.append(
            f"- the normalisation is inside: mean {_numbers(manifest.mean)}, deviation {_numbers(manifest.std)}"
        )
    if manifest.columns:
        lines.append(f"- a row has, in order: {', '.join(repr(name)[1:-1] for name in manifest.columns)}")
    if manifest.unit:
        lines.append(f"- outputs are in {repr(manifest.unit)[1:-1]}")
    if manifest.classes:
        shown = ", ".join(repr(name)[1:-1] for name in manifest.classes[:20])
        more = f" and {len(manifest.classes) - 20} more" if len(manifest.classes) > 20 else ""
        lines.append(f"- outputs, in order: {shown}{more}")
    lines.append(f"- task: {manifest.task}")
    return lines


def _describe_input(record: InputRecord) -> str:
    batch = str(record.batch) if record.batch else "examples"
    return f"{record.type}, ({', '.join([batch, *map(str, record.shape)])}), raw: as the data set stores it"


def _describe_examples(manifest: Manifest) -> str:
    number = manifest.files[0].agreement.examples
    return f"{number} {'test' if manifest.examples == 'test' else 'made-up'} examples"


def _file_row(manifest: Manifest, file: FileRecord) -> list[str]:
    own, model = (
        " / ".join(_number(value) for value in scores.values()) or "–" for scores in (file.score, file.score_of_model)
    )
    agreement = file.agreement
    return [
        f"`{file.name}`" + (" (int8)" if file.quantisation else ""),
        f"{file.bytes:,}",
        ", ".join(file.exits),
        own,
        model,
        f"{agreement.difference:.2g}",
        f"{100 * agreement.same:.1f} %",
    ]


def _describe_cascade(manifest: Manifest) -> list[str]:
    if manifest.cascade is None:
        return [f"There is no cascade: {manifest.no_cascade}.", ""] if manifest.no_cascade else []
    cascade, study = manifest.cascade, manifest.cascade.study
    lines = [
        "## Early exits",
        "",
        f"Threshold {_threshold(cascade.threshold)} ({cascade.rule}). It can be changed in every call.",
        "",
    ]
    if study is None:
        return lines
    rows = [_threshold_row(row) for row in study.table]
    head = ["threshold", "leave early", manifest.metric, "operations"]
    lines += [*_table(head, rows), "", f"On {study.examples} test examples. A threshold chosen here has seen them."]
    if study.held_out is not None:
        row = study.held_out
        lines.append(
            f"Chosen on one half without loss: {_threshold(study.chosen)}. On the other half it gives "
            f"{_number(row.score)} with {100 * row.operations:.0f} % of the operations; the last exit gives "
            f"{_number(study.last_on_held_out)}."
        )
    return [*lines, ""]


def _threshold_row(row: ThresholdRow) -> list[str]:
    return [
        _threshold(row.threshold),
        f"{100 * row.early:.1f} %",
        _number(row.score),
        f"{100 * row.operations:.1f} %",
    ]


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _threshold(value: float) -> str:
    return "never" if value >= NEVER else f"{value:g}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
