"""A user's own data: a folder of images by class, or arrays in an .npz file."""

from __future__ import annotations

import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fedhen import seeds
from fedhen.data.dataset import Data, Normalisation, arrays
from fedhen.errors import UserError
from fedhen.hardware.memory import free_memory

Array = np.ndarray[Any, np.dtype[Any]]

PARTS = ("train", "test")
SUFFIXES = (".png", ".jpg", ".jpeg")
OTHER_SUFFIXES = (".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".heic", ".avif")
GREY, DEEP = ("1", "L"), ("I", "F")
"""Pillow's modes of grey images, and how those of more than 8 bits a pixel begin."""
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
CHANNELS = (1, 3)
AT_ONCE = 1000
"""Images whose pixels are counted at a time: their copies are eight times as large."""


def read_own_data(path: Path) -> Data:
    """The data set at that path: a folder with train/CLASS/*.png and test/CLASS/*.png (or jpg), or an .npz file."""
    try:
        if path.is_dir():
            return _folder(path)
        if not path.exists():
            raise UserError(f"{path} does not exist: name a folder with train/CLASS and test/CLASS, or an .npz file")
        if path.suffix != ".npz":
            raise UserError(f"{path} is neither a folder of images nor an .npz file")
        return _npz(path)
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be read: {error.strerror}") from None


def _folder(path: Path) -> Data:
    pillow = _pillow()
    classes = _subfolders(path / "train")
    found = [_images(path / part, classes) for part in PARTS]
    everything = [image for part in found for image, _ in part]
    looks = [_look(pillow, image) for image in everything]
    (width, height), _ = Counter(size for size, _ in looks).most_common(1)[0]
    for image, (size, _) in zip(everything, looks, strict=True):
        if size != (width, height):
            raise UserError(
                f"{image} is {size[0]}×{size[1]} pixels, the others {width}×{height}: images must have one size"
            )
    mode = "L" if all(mode in GREY for _, mode in looks) else "RGB"
    x, x_test = (_pixels(pillow, [image for image, _ in part], mode, (height, width)) for part in found)
    y, y_test = (np.array([label for _, label in part]) for part in found)
    return _normalised(arrays(x, y, x_test, y_test, len(classes)))


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise UserError("a folder of images needs Pillow: pip install 'fedhen[images]'") from None
    return Image


def _subfolders(path: Path) -> list[str]:
    if not path.is_dir():
        raise UserError(f"{path} is not there: images belong in train/CLASS and test/CLASS")
    names = sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    if not names:
        raise UserError(f"{path} holds no folders: it needs one for each class, with that class's images")
    return names


def _images(path: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """Every image with its label, in a random order that is always the same: the first few hold all classes."""
    found = []
    for name in _subfolders(path):
        if name not in classes:
            raise UserError(f"{path / name} has no fellow among the training images: class {name!r} is not in train")
        files = sorted(file for file in (path / name).iterdir() if not file.name.startswith("."))
        for file in files:
            if file.suffix.lower() in OTHER_SUFFIXES:
                raise UserError(f"{file} is no PNG or JPEG image: convert it, or take it away")
        images = [file for file in files if file.suffix.lower() in SUFFIXES]
        if not images:
            raise UserError(f"{path / name} holds no {', '.join(SUFFIXES)} image: fill it, or take it away")
        found += [(image, classes.index(name)) for image in images]
    return [found[place] for place in seeds.stream(0, "own images", path.name).permutation(len(found))]


def _look(pillow: ModuleType, path: Path) -> tuple[tuple[int, int], str]:
    """An image's size and mode, from its first bytes."""
    with _opened(pillow, path) as image:
        if image.mode.startswith(DEEP):
            raise UserError(f"{path} has more than 8 bits a pixel (mode {image.mode}): save it with 8")
        return image.size, image.mode


def _pixels(pillow: ModuleType, paths: list[Path], mode: str, size: tuple[int, int]) -> Array:
    """(n, channels, height, width) bytes."""
    _check_room(paths[0].parent.parent, len(paths) * len(mode) * size[0] * size[1])
    x = np.empty((len(paths), len(mode), *size), np.uint8)
    for place, path in enumerate(paths):
        with _opened(pillow, path) as image:
            x[place] = np.asarray(image.convert(mode)).reshape(*size, len(mode)).transpose(2, 0, 1)
    return x


@contextmanager
def _opened(pillow: ModuleType, path: Path) -> Iterator[Any]:
    """An image; what is wrong with it is a UserError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(path, formats=("PNG", "JPEG")) as image:
                yield image
    except UserError:
        raise
    except (pillow.DecompressionBombWarning, pillow.DecompressionBombError):
        most = pillow.MAX_IMAGE_PIXELS
        raise UserError(f"{path} claims to have more than {most} pixels: it may be a bomb, take it away") from None
    except pillow.UnidentifiedImageError:
        raise UserError(f"{path} is damaged, or no PNG or JPEG image: mend it, or take it away") from None
    except Exception as error:  # decoders answer damaged files with nearly anything
        reason = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read ({reason}): mend it, or take it away") from None


def _npz(path: Path) -> Data:
    content = _contents(path)
    for name in ("x_train", "x_test"):
        content[name] = _inputs(f"{path}: {name}", content[name])
    if content["x_train"].dtype != content["x_test"].dtype:
        raise UserError(f"{path}: x_train and x_test are of two kinds, bytes and floats: save both in the same way")
    for name in ("y_train", "y_test"):
        if content[name].dtype.kind not in "iu" or content[name].ndim != 1:
            kind = f"{content[name].dtype} of shape {content[name].shape}"
            raise UserError(f"{path}: {name} must be whole numbers of shape (n,), found {kind}")
        content[name] = content[name].astype(np.int64)
    present = set(content["y_train"].tolist())
    classes = len(present)
    if odd := present - set(range(classes)):
        raise UserError(f"{path}: y_train has {classes} classes, so they must be 0 to {classes - 1}, found {min(odd)}")
    if odd := set(content["y_test"].tolist()) - present:
        raise UserError(f"{path}: class {min(odd)} is in y_test, but not in y_train")
    try:
        x, y, x_test, y_test = (content[name] for name in ARRAYS)
        data = arrays(x, y, x_test, y_test, classes)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return _normalised(data) if data.x.dtype == torch.uint8 else data


def _contents(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if missing := [name for name in ARRAYS if name not in file]:
                raise UserError(f"{path} lacks {', '.join(missing)}: it needs {', '.join(ARRAYS)}")
            # What the archive says that it unpacks to, before a bomb does so; numpy reads no further than that.
            _check_room(path, sum(info.file_size for info in _members(file)))
            content = {name: file[name] for name in ARRAYS}
    except UserError:
        raise
    except MemoryError:
        raise UserError(f"{path} holds more than the memory does: save fewer examples, or images as bytes") from None
    except Exception as error:  # a damaged file breaks at any layer: zip, deflate, the arrays' headers
        if "pickle" in str(error):
            raise UserError(f"{path} holds more than plain numbers: Python objects (pickles) are not read") from None
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not an .npz file, or is damaged: {reason}") from None
    for name, value in content.items():
        if not isinstance(value, np.ndarray):  # numpy hands out what is no array as bytes
            raise UserError(f"{path}: {name} is not an array")
    return content


def _members(file: Any) -> Iterator[zipfile.ZipInfo]:
    """The arrays in an .npz file, of which there is one each."""
    for name in ARRAYS:
        found = [info for info in file.zip.infolist() if info.filename.removesuffix(".npy") == name]
        if len(found) != 1:
            raise UserError(f"{file.zip.filename} has {len(found)} arrays named {name}: it needs one")
        yield found[0]


def _check_room(path: Path, needed: int) -> None:
    """Refuse what would not fit: the data is held in memory."""
    free = free_memory(torch.device("cpu"))
    if needed > free:
        raise UserError(
            f"{path} unpacks to {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free: "
            "save fewer or smaller examples, or images as bytes"
        )


def _inputs(label: str, x: Array) -> Array:
    """Images as (n, channels, height, width), bytes as they are and numbers as float32; other floats in their shape."""
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise UserError(f"{label} must be bytes (uint8) or floats, found {x.dtype}")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[-1] in CHANNELS and x.shape[1] not in CHANNELS:
        x = x.transpose(0, 3, 1, 2)
    if x.ndim < 2 or (x.dtype == np.uint8 and (x.ndim != 4 or x.shape[1] not in CHANNELS)):
        shapes = "(n, h, w), (n, h, w, c) or (n, c, h, w) with 1 or 3 channels"
        raise UserError(f"{label} must be images of shape {shapes}, or floats (n, features), found {x.dtype} {x.shape}")
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    with np.errstate(over="ignore"):
        numbers = np.ascontiguousarray(x, np.float32)
    if not np.isfinite(numbers).all():
        raise UserError(f"{label} holds numbers that are not finite in float32: leave those examples out")
    return numbers


def _normalised(data: Data) -> Data:
    """With the mean and the deviation of each channel of the training images; a flat channel is only shifted."""
    x, mean, std = data.x.numpy(), [], []
    for channel in range(x.shape[1]):
        counts = np.zeros(256, np.int64)
        for begin in range(0, len(x), AT_ONCE):
            counts += np.bincount(x[begin : begin + AT_ONCE, channel].ravel(), minlength=256)
        share = counts / counts.sum()
        mean.append(float(share @ np.arange(256)))
        std.append(float(np.sqrt(share @ (np.arange(256) - mean[-1]) ** 2)) or 1.0)
    return replace(data, normalisation=Normalisation(tuple(mean), tuple(std)))
