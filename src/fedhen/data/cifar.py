"""Reads CIFAR-10 and CIFAR-100 from the official binary files, after verifying every byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhen.data.dataset import Data
from fedhen.data.published import Files, require
from fedhen.data.spec import DataSpec, Normalisation

IMAGE = (3, 32, 32)
NAMES = ("cifar10", "cifar100")


def read(files: Files, root: Path) -> Data:
    """Reads a data set from its folder below `root`; a DataError says which file is wrong and how to get it."""
    x, y = _read_examples(files, root, files.train)
    x_test, y_test = _read_examples(files, root, files.test)
    pixels = Normalisation(tuple(255 * m for m in files.mean), tuple(255 * s for s in files.std))
    about = DataSpec(class_names=files.class_names)
    return Data(x, y, x_test, y_test, files.classes, normalisation=pixels, about=about)


def _read_examples(files: Files, root: Path, names: Mapping[str, str]) -> tuple[Tensor, Tensor]:
    rows = np.concatenate([_read_records(files, root / files.folder / name) for name in names])
    images = np.ascontiguousarray(rows[:, files.labels :]).reshape(-1, *IMAGE)
    return torch.from_numpy(images), torch.from_numpy(rows[:, files.labels - 1].astype(np.int64))


def _read_records(files: Files, path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Returns one row per image: its label bytes, then its pixels."""
    require(files, path)
    return np.fromfile(path, np.uint8).reshape(-1, files.labels + int(np.prod(IMAGE)))
