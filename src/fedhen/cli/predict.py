"""`fedhen predict`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedhen.cli.options import add_data_dir
from fedhen.cli.user_files import add_own_parts_again, check_again, load_own_parts
from fedhen.config import toml
from fedhen.deploy.manifest import MANIFEST, read_threshold
from fedhen.deploy.reading import Batch, read_batch
from fedhen.deploy.runtime import Answer, check_inputs, open_export
from fedhen.errors import ConfigError, FedhenError
from fedhen.runs.folders import find_config

EXAMPLES = """\
examples:
  fedhen predict runs/digits image.png other.png     class, probability and exit of each image
  fedhen predict runs/digits/export images/          the same from an exported file; needs no torch
  fedhen predict runs/shakespeare "To be, or not "   the next character
"""


def add_commands(commands: Any) -> None:
    command = commands.add_parser(
        "predict",
        help="predict images, arrays or text with a run or an export",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("folder", type=Path, metavar="RUN|EXPORT", help="a run folder, or one that export wrote")
    command.add_argument("inputs", nargs="+", metavar="INPUT", help="images, folders, an .npy or .npz file, or text")
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
        export = open_export(options.folder)
        classes, task = export.manifest.classes, export.manifest.task
        batch = read_batch(options.inputs, export.manifest.files[0].inputs, classes)
        answer = export.predict(batch.arrays, options.tier, threshold, options.int8)
    elif options.int8:
        raise ConfigError("--int8 is for exports: export the run with --int8 first")
    else:
        batch, answer, classes, task = _predict_with_run(options, threshold)
    if task not in ("classification", "language-modelling"):
        raise FedhenError(f"predict shows classes, and the task is {task!r}: use the files from Python")
    _show(batch, answer, classes, options.json)
    return 0


def _predict_with_run(options: argparse.Namespace, threshold: float | None) -> tuple[Batch, Answer, list[str], str]:
    config = toml.read_toml(find_config(options.folder))
    from fedhen.api.deploying import make_source, predict_source, refuse_choice

    check_again(options, config)
    own = load_own_parts(options)
    refuse_choice(options.device, options.tier)
    parts = {"device": options.device, "family": own.family, "data": own.data, "task": own.task}
    source = make_source(options.folder, **parts, data_dir=options.data_dir)
    batch = read_batch(options.inputs, source.inputs, source.classes)
    answer = predict_source(source, check_inputs(batch.arrays, source.inputs), options.tier, threshold)
    return batch, answer, list(source.classes), source.task.name


def _show(batch: Batch, answer: Answer, classes: Sequence[str], as_json: bool) -> None:
    output = answer.output.astype(np.float64)
    if output.ndim == 3:  # a position for each token: the last one predicts what comes next
        ends = np.array(batch.lengths or [output.shape[1]] * len(output)) - 1
        output = output[np.arange(len(output)), ends]
    if output.ndim != 2 or not output.shape[1]:
        raise FedhenError(f"the model gives outputs of shape {output.shape[1:]}, which are no classes")
    shares = np.exp(output - output.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    width = max(len(name) for name in batch.names)
    for name, row, exit in zip(batch.names, shares, answer.exits, strict=True):
        best = int(row.argmax())
        label = classes[best] if best < len(classes) else str(best)
        if as_json:
            line = {"input": name, "class": label, "probability": round(float(row[best]), 6), "exit": exit}
            print(json.dumps(line, ensure_ascii=False))
        else:
            print(f"{name:{width}}  {label!r:14} {100 * row[best]:5.1f} %  {exit}")
    if not as_json and len(batch.names) > 1:
        taken = Counter(answer.exits)
        print("exits: " + ", ".join(f"{exit} {100 * n / len(batch.names):.0f} %" for exit, n in taken.items()))
