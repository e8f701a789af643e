"""What trackers have stored, read back with their own readers."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

import fedhen

Curves = dict[str, list[tuple[int, float]]]
"""Name -> (step, value), in the order of the steps."""


def data() -> fedhen.Data:
    rng = np.random.default_rng(0)
    return fedhen.arrays(rng.normal(size=(60, 6)), np.arange(60) % 3, rng.normal(size=(30, 6)), np.arange(30) % 3)


SMALL: dict[str, Any] = {
    "devices": {"number": 4, "active": 2},
    "checkpoint": {"rounds": 1},
    "evaluation": {"every": 1},
    "accelerator": "cpu",
    "progress": False,
}


def read_tensorboard(folder: Path) -> tuple[Curves, dict[str, Any]]:
    """Returns the curves, as TensorBoard shows them, and the settings."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    curves = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    return curves, {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()}


def read_mlflow(store: Path) -> list[tuple[Any, Curves, list[str]]]:
    """Returns for each run in a SQLite store the run, its curves and the names of its artifacts."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{store}")
    experiment = client.get_experiment_by_name("fedhen")
    assert experiment is not None
    runs = []
    for run in client.search_runs([experiment.experiment_id], order_by=["start_time"]):
        curves = {
            name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        runs.append((run, curves, [item.path for item in client.list_artifacts(run.info.run_id, "models")]))
    return runs


def read_wandb(folder: Path) -> tuple[list[Any], Curves]:
    """Returns the records of the offline runs in a folder, oldest first, and the curves in them."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    paths = sorted(folder.glob("offline-run-*/*.wandb"), key=lambda path: path.parent.name)
    records = [Record.FromString(entry) for path in paths for entry in _read_log(path.read_bytes())]
    curves: Curves = defaultdict(list)
    for history in (record.history for record in records if record.WhichOneof("record_type") == "history"):
        for item in history.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_"):
                curves[name].append((history.step.num, json.loads(item.value_json)))
    return records, dict(curves)


def _read_log(content: bytes) -> list[bytes]:
    """LevelDB's log format: blocks of 32 KiB with (checksum, length, type) before each part of an entry."""
    entries, parts, place, block, head = list[bytes](), b"", 7, 1 << 15, 7
    while place + head <= len(content):
        left = block - place % block
        if left < head:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + head])
        parts += content[place + head : place + head + length]
        place += head + length
        if kind in (1, 4):  # the whole entry, or the last part of one
            entries.append(parts)
            parts = b""
    return entries
