"""The embedded data set: 1,797 grey 8×8 digits."""

from __future__ import annotations

import gzip
from importlib.resources import files

import numpy as np
import torch

from fedhen.data.dataset import Data
from fedhen.data.spec import DataSpec, InputSpec, Normalisation

TEST_IMAGES, HIGHEST = 360, 16


def load_digits() -> Data:
    """Returns the digits: the last 360 for testing, the 1,437 before them for training."""
    packed = files("fedhen.data.digits").joinpath("digits.csv.gz").read_bytes()
    table = np.array([line.split(",") for line in gzip.decompress(packed).decode().split()], dtype=np.float32)
    x = torch.from_numpy(table[:, :-1].astype(np.uint8)).view(-1, 1, 8, 8)
    y = torch.from_numpy(table[:, -1].astype(np.int64))
    train, test = slice(0, len(y) - TEST_IMAGES), slice(len(y) - TEST_IMAGES, len(y))
    # Pixels from 0 to 16 become numbers from 0 to 1.
    scale = Normalisation((0.0,), (float(HIGHEST),))
    about = DataSpec((InputSpec(highest=HIGHEST),), tuple("0123456789"), "digit")
    return Data(x[train], y[train], x[test], y[test], 10, normalisation=scale, about=about)
