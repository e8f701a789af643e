"""Loads the data set that a configuration names."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedhen import seeds
from fedhen.config.settings import OWN, DataConfig
from fedhen.data import cifar
from fedhen.data.dataset import Data
from fedhen.data.digits import load_digits
from fedhen.data.image_folder import read_image_folder
from fedhen.data.inputs import take
from fedhen.data.npz import read_npz
from fedhen.data.published import PUBLISHED
from fedhen.errors import UserError, unknown_name

DIGITS = "digits"


def load_data(config: DataConfig, root: Path, seed: int = 0) -> Data:
    """Returns the data set that a configuration names; downloaded data sets are read from `root`."""
    name = config.name
    if name == OWN:
        raise UserError("the data of this run was passed from Python: pass it again from Python, as data=...")
    if name == DIGITS:
        data = load_digits()
    elif name in cifar.NAMES:
        data = cifar.read(PUBLISHED[name], root)
    elif "/" in name or os.sep in name or name.endswith(".npz"):
        data = read_own_data(Path(name))
    else:
        raise UserError(
            f"{unknown_name('data set', name, (DIGITS, *cifar.NAMES))}, or give the path of a folder or an .npz file"
        )
    return _select(data, config, seed)


def read_own_data(path: Path) -> Data:
    """Reads a user's own data: a folder with train/CLASS/*.png and test/CLASS/*.png (or .jpg), or an .npz file."""
    try:
        if path.is_dir():
            return read_image_folder(path)
        if not path.exists():
            raise UserError(f"{path} does not exist: name a folder with train/CLASS and test/CLASS, or an .npz file")
        if path.suffix != ".npz":
            raise UserError(f"{path} is neither a folder of images nor an .npz file")
        return read_npz(path)
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be read: {error.strerror}") from None


def _select(data: Data, config: DataConfig, seed: int) -> Data:
    if config.limit:
        first = slice(config.limit)
        data = replace(data, x=take(data.x, first), y=data.y[first])
        data = replace(data, x_test=take(data.x_test, first), y_test=data.y_test[first])
    if config.fraction < 1:
        kept = max(1, round(config.fraction * len(data.y)))
        # The same draw as the IID split's: half of the examples are those of the first half of its devices.
        index = torch.from_numpy(np.sort(seeds.stream(seed, "split").permutation(len(data.y))[:kept]))
        data = replace(data, x=take(data.x, index), y=data.y[index])
    return data
