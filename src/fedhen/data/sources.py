"""Named data sets."""

from __future__ import annotations

import gzip
import os
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from fedhen import seeds
from fedhen.config.settings import OWN, DataConfig
from fedhen.data import cifar, image_folder
from fedhen.data.dataset import Data, Normalisation
from fedhen.data.published import PUBLISHED
from fedhen.errors import UserError, unknown_name

DIGITS, TEST_DIGITS = "digits", 360


def digits() -> Data:
    """1,797 8×8 grey digits, embedded: the last 360 for testing, the 1,437 before them for training."""
    packed = files("fedhen.data").joinpath("digits", "digits.csv.gz").read_bytes()
    table = np.array([line.split(",") for line in gzip.decompress(packed).decode().split()], dtype=np.float32)
    x = torch.from_numpy(table[:, :-1].astype(np.uint8)).view(-1, 1, 8, 8)
    y = torch.from_numpy(table[:, -1].astype(np.int64))
    train, test = slice(0, len(y) - TEST_DIGITS), slice(len(y) - TEST_DIGITS, len(y))
    # Pixels from 0 to 16 become numbers from 0 to 1.
    return Data(x[train], y[train], x[test], y[test], 10, normalisation=Normalisation((0.0,), (16.0,)))


def load_data(config: DataConfig, root: Path, seed: int = 0) -> Data:
    """The data set that a configuration names, from the folder for downloaded data if it is one of those."""
    name = config.name
    if name == OWN:
        raise UserError("the data of this run was given in Python: give it again from Python, as data=...")
    if name == DIGITS:
        data = digits()
    elif name in PUBLISHED:
        data = cifar.read(PUBLISHED[name], root)
    elif "/" in name or os.sep in name or name.endswith(".npz"):
        data = image_folder.read_own_data(Path(name))
    else:
        raise UserError(
            f"{unknown_name('data set', name, (DIGITS, *PUBLISHED))}, or give the path of a folder or an .npz file"
        )
    return _part(data, config, seed)


def _part(data: Data, config: DataConfig, seed: int) -> Data:
    """The first examples up to the limit, of both parts, and a random share of the training examples."""
    if config.limit:
        parts = {name: getattr(data, name)[: config.limit] for name in ("x", "y", "x_test", "y_test")}
        data = replace(data, **parts)
    if config.fraction < 1:
        kept = max(1, round(config.fraction * len(data.y)))
        # The IID split's own draw: half of the examples are those of its first half of the devices.
        index = torch.from_numpy(np.sort(seeds.stream(seed, "split").permutation(len(data.y))[:kept]))
        data = replace(data, x=data.x[index], y=data.y[index])
    return data
