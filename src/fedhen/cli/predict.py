"""`fedhen predict`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedhen.cli.options import add_data_dir
from fedhen.cli.user_files import add_own_parts_again, check_again, load_own_parts
from fedhen.config import toml
from fedhen.deploy.manifest import MANIFEST, Manifest, read_threshold
from fedhen.deploy.reading import Batch, list_given, read_batch
from fedhen.deploy.runtime import Answer, check_inputs, open_export
from fedhen.errors import ConfigError, FedhenError
from fedhen.runs.folders import find_config

CLASSES = ("classification", "language-modelling")
"""The tasks that predict one class."""
EXAMPLES = """\
examples:
  fedhen predict runs/digits image.png other.png     class, probability and exit of each image
  fedhen predict runs/digits/export images/          the same from an exported file; needs no torch
  fedhen predict runs/shakespeare "To be, or not "   the next character
  fedhen predict runs/people people.csv              a line for each row, by the names of its columns
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "predict",
        help="predict images, tables, arrays or text with a run or an export",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("folder", type=Path, metavar="RUN|EXPORT", help="a run folder, or one that export wrote")
    command.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="images, folders, a .csv, .npy or .npz file, or text"
    )
    command.add_argument("--tier", metavar="TIER", help="predict with the last exit of this tier's model")
    command.add_argument(
        "--device", type=int, metavar="N", help="of a run with personal models, predict with that of device N"
    )
    command.add_argument("--threshold", metavar="X", help="how sure an exit must be: 0 to 1, or never (default: 0.9)")
    command.add_argument("--int8", action="store_true", help="use an export's int8 file")
    command.add_argument("--json", action="store_true", help="print one JSON object for each input")
    add_own_parts_again(command)
    add_data_dir(command)
    command.set_defaults(run=predict_command)


def predict_command(options: argparse.Namespace) -> int:
    threshold = None if options.threshold is None else read_threshold(options.threshold)
    if (options.folder / MANIFEST).is_file():
        if options.device is not None:
            raise ConfigError("--device is for runs: an export has the models that its manifest names")
        lines = _predict_with_export(options, threshold)
    elif options.int8:
        raise ConfigError("--int8 is for exports: export the run with --int8 first")
    else:
        lines = _predict_with_run(options, threshold)
    _show(lines, options.json)
    return 0


@dataclass(frozen=True)
class Line:
    """What is shown of an example."""

    name: str
    key: str
    """How JSON calls the value: `class` or `value`."""
    value: Any
    probability: float | None
    exit: str
    unit: str = ""

    def to_dict(self) -> dict[str, Any]:
        sure = {} if self.probability is None else {"probability": round(self.probability, 6)}
        unit = {"unit": self.unit} if self.unit and self.key == "value" else {}
        return {"input": self.name, self.key: self.value, **unit, **sure, "exit": self.exit}

    def describe(self) -> str:
        if self.key == "class":
            shown = f"{self.value!r:14}"
        elif isinstance(self.value, float):
            shown = f"{self.value:.6g}{' ' * bool(self.unit)}{self.unit}"
        else:
            shown = ", ".join(map(str, self.value)) if isinstance(self.value, list) else str(self.value)
        sure = "" if self.probability is None else f" {100 * self.probability:5.1f} %"
        return f"{shown}{sure}  {self.exit}"


def _predict_with_export(options: argparse.Namespace, threshold: float | None) -> list[Line]:
    export = open_export(options.folder)
    classes, task = export.manifest.classes, export.manifest.task
    batch = read_batch(options.inputs, export.manifest.files[0].inputs, classes, export.manifest.columns)
    if task not in (*CLASSES, "regression"):
        raise FedhenError(f"exports show classes and numbers, and the task is {task!r}: predict with the run")
    answer = export.predict(batch.arrays, options.tier, threshold, options.int8)
    return _find_classes(batch, answer, classes) if task in CLASSES else _find_numbers(batch, answer, export.manifest)


def _predict_with_run(options: argparse.Namespace, threshold: float | None) -> list[Line]:
    config = toml.read_toml(find_config(options.folder))
    from fedhen.api.deploying import (
        make_device_source,
        make_source_to_predict,
        predict_raw,
        predict_source,
        refuse_choice,
    )

    check_again(options, config)
    own = load_own_parts(options)
    refuse_choice(options.device, options.tier)
    source = (
        make_source_to_predict(options.folder, own, options.data_dir)
        if options.device is None
        else make_device_source(options.folder, options.device, own, options.data_dir)
    )
    if source.spec is None:
        # Of a run from before inputs were described.
        batch = read_batch(options.inputs, source.inputs, source.classes)
        answer = predict_source(source, check_inputs(batch.arrays, source.inputs), options.tier, threshold)
        return _find_classes(batch, answer, source.classes)
    raw, names = list_given(options.inputs, source.spec.inputs[0].kind)
    found = predict_raw(source, raw, options.tier, threshold)
    names = names or [f"{Path(options.inputs[0]).name}[{place}]" for place in range(len(found))]
    key = "class" if source.task.name in CLASSES else "value"
    return [
        Line(name, key, _plain(each.value), each.probability, each.exit, source.spec.unit)
        for name, each in zip(names, found, strict=True)
    ]


def _plain(value: Any) -> Any:
    """Returns a predicted value as JSON has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _find_numbers(batch: Batch, answer: Answer, manifest: Manifest) -> list[Line]:
    numbers = answer.output.reshape(len(batch.names), -1).tolist()
    return [
        Line(name, "value", row[0] if len(row) == 1 else row, None, exit, manifest.unit)
        for name, row, exit in zip(batch.names, numbers, answer.exits, strict=True)
    ]


def _find_classes(batch: Batch, answer: Answer, classes: Sequence[str]) -> list[Line]:
    output = answer.output.astype(np.float64)
    if output.ndim == 3:  # a position for each token: the last one predicts what comes next
        ends = np.array(batch.lengths or [output.shape[1]] * len(output)) - 1
        output = output[np.arange(len(output)), ends]
    if output.ndim != 2 or not output.shape[1]:
        raise FedhenError(f"the model gives outputs of shape {output.shape[1:]}, which are no classes")
    shares = np.exp(output - output.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    found = []
    for name, row, exit in zip(batch.names, shares, answer.exits, strict=True):
        best = int(row.argmax())
        found.append(Line(name, "class", classes[best] if best < len(classes) else str(best), float(row[best]), exit))
    return found


def _show(lines: Sequence[Line], as_json: bool) -> None:
    if as_json:
        for line in lines:
            print(json.dumps(line.to_dict(), ensure_ascii=False))
        return
    width = max(len(line.name) for line in lines)
    for line in lines:
        print(f"{line.name:{width}}  {line.describe()}")
    if len(lines) > 1:
        taken = Counter(line.exit for line in lines)
        print("exits: " + ", ".join(f"{exit} {100 * n / len(lines):.0f} %" for exit, n in taken.items()))
