"""Reads a user's own images from a folder with train/CLASS and test/CLASS."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedhen import seeds
from fedhen.data.arrays import read_arrays
from fedhen.data.dataset import Data
from fedhen.data.pixels import Array, check_memory, normalise_pixels
from fedhen.data.spec import DataSpec, InputSpec
from fedhen.errors import DataError, FedhenError, one_line

PARTS = ("train", "test")
SUFFIXES = (".png", ".jpg", ".jpeg")
OTHER_SUFFIXES = (".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".heic", ".avif")
GREY, DEEP = ("1", "L"), ("I", "F")
"""Pillow's modes of grey images, and the first letters of its modes with more than 8 bits per pixel."""


def read_image_folder(path: Path, side: int = 0) -> Data:
    """Reads PNG and JPEG images, grey or RGB; a DataError names the file that is wrong.

    They must have one size, unless `side` is the height and width that they are resized to.
    """
    pillow = import_pillow()
    classes = _list_classes(path / "train")
    found = [_list_images(path / part, classes) for part in PARTS]
    everything = [image for part in found for image, _ in part]
    headers = [_read_header(pillow, image) for image in everything]
    (width, height), _ = Counter(size for size, _ in headers).most_common(1)[0]
    for image, (size, _) in zip(everything, headers, strict=True):
        if size != (width, height) and not side:
            raise DataError(
                f"{image} is {size[0]}×{size[1]} pixels, the others {width}×{height}: images must have one size; "
                "data.size resizes them, like --set data.size=64"
            )
    width, height = (side, side) if side else (width, height)
    mode = "L" if all(mode in GREY for _, mode in headers) else "RGB"
    x, x_test = (_read_images(pillow, [image for image, _ in part], mode, (height, width)) for part in found)
    y, y_test = (np.array([label for _, label in part]) for part in found)
    data = read_arrays(x, y, x_test, y_test, class_names=classes)
    return normalise_pixels(replace(data, about=DataSpec((InputSpec(resized=bool(side)),), tuple(classes))))


def import_pillow() -> ModuleType:
    """Returns Pillow's module of images. Raises a DataError if it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("images need Pillow: pip install 'fedhen[images]'") from None
    return Image


def _list_classes(path: Path) -> list[str]:
    if not path.is_dir():
        raise DataError(f"{path} does not exist: images belong in train/CLASS and test/CLASS")
    names = sorted(child.name for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    if not names:
        raise DataError(f"{path} contains no folders: it needs one for each class, with that class's images")
    return names


def _list_images(path: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """Returns every image with its label, in a fixed random order, so that the first few include all classes."""
    found = []
    for name in _list_classes(path):
        if name not in classes:
            raise DataError(
                f"{path / name}: class {name!r} appears in test/ but not in train/: remove it, or add training images"
            )
        files = sorted(file for file in (path / name).iterdir() if not file.name.startswith("."))
        for file in files:
            if file.suffix.lower() in OTHER_SUFFIXES:
                raise DataError(f"{file} is not a PNG or JPEG image: convert or remove it")
        images = [file for file in files if file.suffix.lower() in SUFFIXES]
        if not images:
            raise DataError(f"{path / name} contains no {', '.join(SUFFIXES)} image: add some, or remove the folder")
        found += [(image, classes.index(name)) for image in images]
    return [found[place] for place in seeds.stream(0, "own images", path.name).permutation(len(found))]


def _read_header(pillow: ModuleType, path: Path) -> tuple[tuple[int, int], str]:
    with open_image(pillow, path) as image:
        check_depth(image, path)
        return image.size, image.mode


def _read_images(pillow: ModuleType, paths: list[Path], mode: str, size: tuple[int, int]) -> Array:
    """Returns (n, channels, height, width) bytes."""
    check_memory(paths[0].parent.parent, len(paths) * len(mode) * size[0] * size[1])
    x = np.empty((len(paths), len(mode), *size), np.uint8)
    for place, path in enumerate(paths):
        with open_image(pillow, path) as image:
            x[place] = read_pixels(pillow, image, mode, size)
    return x


def read_pixels(pillow: ModuleType, image: Any, mode: str, size: tuple[int, int]) -> Array:
    """Returns the pixels of an image, (channels, height, width). It is resized if it has another size."""
    pixels = image.convert(mode)
    if pixels.size != size[::-1]:
        pixels = pixels.resize(size[::-1], pillow.Resampling.BILINEAR)
    return np.asarray(pixels).reshape(*size, len(mode)).transpose(2, 0, 1)


def check_depth(image: Any, label: object) -> None:
    """Raises a DataError if an image has more than 8 bits per pixel."""
    if image.mode.startswith(DEEP):
        raise DataError(f"{label} has more than 8 bits per pixel (mode {image.mode}): save it with 8")


@contextmanager
def open_image(pillow: ModuleType, path: Path) -> Iterator[Any]:
    """Opens a PNG or JPEG file. Raises a DataError if it is damaged."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(path, formats=("PNG", "JPEG")) as image:
                yield image
    except FedhenError:
        raise
    except (pillow.DecompressionBombWarning, pillow.DecompressionBombError):
        most = pillow.MAX_IMAGE_PIXELS
        raise DataError(f"{path} declares more than {most} pixels, as a decompression bomb does: remove it") from None
    except pillow.UnidentifiedImageError:
        raise DataError(f"{path} is damaged, or not a PNG or JPEG image: repair or remove it") from None
    except Exception as error:  # decoders answer damaged files with nearly anything
        raise DataError(f"{path} cannot be read ({one_line(str(error))}): repair or remove it") from None
