"""Reads a user's own arrays from an .npz file; Python objects (pickles) in it are never loaded."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedhen.data.arrays import read_arrays
from fedhen.data.dataset import Data, Index
from fedhen.data.pixels import Array, check_memory, normalise_pixels
from fedhen.errors import DataError, FedhenError, one_line

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
DEVICE = "device"
"""The array that says which device each training example belongs to, unless another one is named."""
CHANNELS = (1, 3)


def read_npz(path: Path, by: str = "") -> Data:
    """Reads x_train, y_train, x_test and y_test from an .npz file; a DataError says what is wrong with one of them.

    If there is an array `device`, or another one named by `by`, it says which device each training example belongs to.
    """
    content = _load(path, by)
    owners = content.pop(by or DEVICE, None)
    for name in ("x_train", "x_test"):
        content[name] = _convert_inputs(f"{path}: {name}", content[name])
    if content["x_train"].dtype != content["x_test"].dtype:
        raise DataError(f"{path}: x_train and x_test have two types, bytes and floats: save both as the same type")
    for name in ("y_train", "y_test"):
        if content[name].dtype.kind not in "iu" or content[name].ndim != 1:
            found = f"{content[name].dtype} of shape {content[name].shape}"
            raise DataError(f"{path}: {name} must be whole numbers of shape (n,), found {found}")
        content[name] = content[name].astype(np.int64)
    present = set(content["y_train"].tolist())
    classes = len(present)
    if odd := present - set(range(classes)):
        raise DataError(f"{path}: y_train has {classes} classes, so they must be 0 to {classes - 1}, found {min(odd)}")
    if odd := set(content["y_test"].tolist()) - present:
        raise DataError(f"{path}: class {min(odd)} appears in y_test but not in y_train: add training examples of it")
    try:
        x, y, x_test, y_test = (content[name] for name in ARRAYS)
        data = read_arrays(x, y, x_test, y_test, classes)
    except FedhenError as error:
        raise DataError(f"{path}: {error}") from None
    data = data if owners is None else data.split(_split_examples(f"{path}: {by or DEVICE}", owners, len(y)))
    return normalise_pixels(data) if x.dtype == np.uint8 else data


def _split_examples(label: str, owners: Array, number: int) -> list[Index]:
    """Returns the examples of each device. The devices are the distinct values in sorted order."""
    if owners.dtype.kind not in "iuUS" or owners.shape != (number,):
        found = f"{owners.dtype} of shape {owners.shape}"
        raise DataError(f"{label} must be whole numbers or text of shape ({number},), like y_train, found {found}")
    devices, places = np.unique(owners, return_inverse=True)
    return [np.flatnonzero(places == device) for device in range(len(devices))]


def _load(path: Path, by: str) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            names = [*ARRAYS, *[by or DEVICE] * (bool(by) or DEVICE in file)]
            if missing := [name for name in names if name not in file]:
                raise DataError(f"{path} lacks {', '.join(missing)}: it needs {', '.join(names)}")
            # The sizes that the archive declares, before a bomb is unpacked: numpy reads no further than that.
            check_memory(path, sum(info.file_size for info in _members(file, names)))
            content = {name: file[name] for name in names}
    except FedhenError:
        raise
    except MemoryError:
        raise DataError(f"{path} does not fit the memory: save fewer examples, or images as bytes") from None
    except Exception as error:  # a damaged file fails at any layer: zip, deflate, the arrays' headers
        if "pickle" in str(error):
            raise DataError(f"{path} holds Python objects (pickles), which are not read: save plain numbers") from None
        raise DataError(f"{path} is not an .npz file, or is damaged: {one_line(str(error))}") from None
    for name, value in content.items():
        if not isinstance(value, np.ndarray):  # numpy returns the bytes of a member that is not an array
            raise DataError(f"{path}: {name} is not an array")
    return content


def _members(file: Any, names: Sequence[str]) -> Iterator[zipfile.ZipInfo]:
    for name in names:
        found = [info for info in file.zip.infolist() if info.filename.removesuffix(".npy") == name]
        if len(found) != 1:
            raise DataError(f"{file.zip.filename} has {len(found)} arrays named {name}: it needs one")
        yield found[0]


def _convert_inputs(label: str, x: Array) -> Array:
    """Returns images as (n, channels, height, width), floats as float32; floats of other shapes keep theirs."""
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise DataError(f"{label} must be bytes (uint8) or floats, found {x.dtype}")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[-1] in CHANNELS and x.shape[1] not in CHANNELS:
        x = x.transpose(0, 3, 1, 2)
    if x.ndim < 2 or (x.dtype == np.uint8 and (x.ndim != 4 or x.shape[1] not in CHANNELS)):
        shapes = "(n, h, w), (n, h, w, c) or (n, c, h, w) with 1 or 3 channels"
        raise DataError(f"{label} must be images of shape {shapes}, or floats (n, features), found {x.dtype} {x.shape}")
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    with np.errstate(over="ignore"):
        numbers = np.ascontiguousarray(x, np.float32)
    if not np.isfinite(numbers).all():
        raise DataError(f"{label} holds numbers that are not finite in float32: remove those examples")
    return numbers
