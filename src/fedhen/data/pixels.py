"""What the readers of a user's own data share: a check of the memory that it needs, and the normalisation of pixels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhen.data.dataset import Data
from fedhen.data.spec import Normalisation
from fedhen.errors import DataError
from fedhen.hardware.memory import free_memory

Array = np.ndarray[Any, np.dtype[Any]]
IMAGES_AT_ONCE = 1000
"""Images whose pixels are counted at a time: numpy copies them at eight times their size."""


def check_memory(path: Path, needed: int) -> None:
    """Raises a DataError if `needed` bytes do not fit the free memory, in which the data is held."""
    free = free_memory(torch.device("cpu"))
    if needed > free:
        raise DataError(
            f"{path} unpacks to {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free: "
            "save fewer or smaller examples, or images as bytes"
        )


def normalise_pixels(data: Data) -> Data:
    """Returns the data with a normalisation by each channel's mean and deviation over the training images.

    A channel without deviation is only shifted.
    """
    x, mean, std = data.x.numpy(), [], []
    for channel in range(x.shape[1]):
        counts = np.zeros(256, np.int64)
        for begin in range(0, len(x), IMAGES_AT_ONCE):
            counts += np.bincount(x[begin : begin + IMAGES_AT_ONCE, channel].ravel(), minlength=256)
        share = counts / counts.sum()
        mean.append(float(share @ np.arange(256)))
        std.append(float(np.sqrt(share @ (np.arange(256) - mean[-1]) ** 2)) or 1.0)
    return replace(data, normalisation=Normalisation(tuple(mean), tuple(std)))
