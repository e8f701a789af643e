"""Named data sets."""

from __future__ import annotations

import gzip
from dataclasses import replace
from importlib.resources import files

import numpy as np
import torch

from fedhen.data.dataset import Data, Normalisation
from fedhen.errors import unknown

TEST_DIGITS = 360


def digits() -> Data:
    """1,797 8×8 grey digits, embedded: the last 360 for testing, the 1,437 before them for training."""
    packed = files("fedhen.data").joinpath("digits", "digits.csv.gz").read_bytes()
    table = np.array([line.split(",") for line in gzip.decompress(packed).decode().split()], dtype=np.float32)
    x = torch.from_numpy(table[:, :-1].astype(np.uint8)).view(-1, 1, 8, 8)
    y = torch.from_numpy(table[:, -1].astype(np.int64))
    train, test = slice(0, len(y) - TEST_DIGITS), slice(len(y) - TEST_DIGITS, len(y))
    # Pixels from 0 to 16 become numbers from 0 to 1.
    return Data(x[train], y[train], x[test], y[test], 10, normalisation=Normalisation((0.0,), (16.0,)))


SOURCES = {"digits": digits}


def load(name: str, limit: int = 0) -> Data:
    """The data set of that name; a limit keeps the first examples of each part (0: all)."""
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    data = SOURCES[name]()
    if not limit:
        return data
    return replace(data, **{name: getattr(data, name)[:limit] for name in ("x", "y", "x_test", "y_test")})
