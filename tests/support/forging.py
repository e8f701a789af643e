"""Checkpoints with right checksums and something else in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fedhen.experiment import checkpoint_files
from fedhen.experiment.checkpoint_files import Checkpoint, Entry, spec_of

Change = Callable[[dict[str, Any], list[Entry]], Any]


def forge_checkpoint(folder: Path, number: int, change: Change) -> Checkpoint:
    """Rewrites the checkpoint of a round with a change of its manifest and entries."""
    saved = checkpoint_files.open_checkpoint(folder / "checkpoints", number)
    about = json.loads(json.dumps({k: v for k, v in saved.manifest.items() if k not in ("check", "round")}))
    tensors = {name: saved.tensor(name) for name in saved.kinds()}
    entries = [Entry(name, spec_of(tensor), partial(tensors.__getitem__, name)) for name, tensor in tensors.items()]
    change(about, entries)
    for key in ("format", "bytes", "sha256"):
        about.pop(key)
    checkpoint_files.write_checkpoint(folder / "checkpoints", number, entries, about)
    return checkpoint_files.open_checkpoint(folder / "checkpoints", number)
