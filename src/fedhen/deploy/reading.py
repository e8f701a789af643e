"""Reads what models predict: images, folders of images, .npy and .npz files, and text. Needs no torch."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedhen.deploy.manifest import LARGEST_SIDE, InputRecord
from fedhen.errors import DataError, one_line

IMAGES = (".png", ".jpg", ".jpeg")
ARRAYS, TABLES = (".npy", ".npz"), (".csv", ".parquet", ".pq")
MODES = {1: "L", 3: "RGB"}
"""Channels -> Pillow's mode."""
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Batch:
    """Examples to predict, each with a name to show."""

    arrays: dict[str, Array]
    names: list[str]
    lengths: list[int] | None = None
    """Of texts: the characters that a row begins with."""


def list_given(given: Sequence[str], kind: str) -> tuple[Any, list[str]]:
    """Returns what the command line names as Python takes it, and a name for each example, if that is known yet.

    `kind` is what the model takes: pixels, tokens, rows or numbers.
    """
    paths = [Path(each) for each in given]
    alone = [path for path in paths if path.suffix in (*ARRAYS, *TABLES)]
    if alone and len(paths) > 1:
        raise DataError(f"{alone[0]} is an array or a table: give it alone, one file at a time")
    if alone and alone[0].suffix in ARRAYS:
        arrays = load_arrays(alone[0])
        return next(iter(arrays.values())) if len(arrays) == 1 else arrays, []
    if alone and kind == "rows":
        return alone[0], []
    if kind == "tokens":
        return [_read_text(each) for each in given], [repr(_read_text(each)[-20:]) for each in given]
    if kind != "pixels":
        wanted = "a .csv, .npy or .npz file" if kind == "rows" else "an .npy or .npz file"
        raise DataError(
            f"{given[0]}: the model takes {kind if kind == 'numbers' else 'rows of a table'}: give {wanted}"
        )
    files = [file for path in paths for file in (_list_images(path) if path.is_dir() else [path])]
    if odd := [file for file in files if file.suffix.lower() not in IMAGES]:
        raise DataError(f"{odd[0]} is not one of {', '.join((*IMAGES, *ARRAYS))} or a folder")
    return files, [str(file) for file in files]


def _read_text(given: str) -> str:
    path = Path(given)
    return path.read_text(encoding="utf-8") if path.suffix == ".txt" and path.is_file() else given


def read_batch(
    given: Sequence[str], records: Sequence[InputRecord], classes: Sequence[str], columns: Sequence[str] = ()
) -> Batch:
    """Reads files, folders or texts as a model's inputs. Raises a DataError that names what cannot be read.

    `columns` are the names of the columns of a table that the model takes, if they are known.
    """
    paths = [Path(each) for each in given]
    if len(paths) == 1 and paths[0].suffix in ARRAYS:
        return _read_arrays(paths[0], records)
    if len(paths) == 1 and paths[0].suffix == ".csv" and columns:
        return _read_csv(paths[0], records[0], columns)
    if alone := [path for path in paths if path.suffix in (*ARRAYS, *TABLES)]:
        kinds = ".csv, .npy or .npz" if columns else ".npy or .npz"
        raise DataError(f"{alone[0]}: give one {kinds} file, alone")
    if len(records) > 1:
        raise DataError(f"the model takes {', '.join(r.name for r in records)}: give one .npz file with these arrays")
    record = records[0]
    if classes and all(len(name) == 1 for name in classes) and len(record.shape) == 1 and record.type == "int64":
        return _read_texts(given, record, classes)
    files = [file for path in paths for file in (_list_images(path) if path.is_dir() else [path])]
    return Batch({record.name: np.stack([_read_image(file, record) for file in files])}, [str(file) for file in files])


def _read_arrays(path: Path, records: Sequence[InputRecord]) -> Batch:
    found, names = load_arrays(path), [record.name for record in records]
    arrays = {name: found[name] for name in names if name in found}
    if len(found) == len(records) == 1:
        arrays = dict(zip(names, found.values(), strict=True))
    for record in records:
        if record.type.startswith("float") and (given := arrays.get(record.name)) is not None:
            # numpy makes float64 and int64 of what people write.
            arrays[record.name] = given.astype(record.type) if given.dtype in (np.float64, np.int64) else given
    number = len(next(iter(arrays.values()))) if arrays and next(iter(arrays.values())).ndim else 0
    return Batch(arrays, [f"{path.name}[{place}]" for place in range(number)])


def load_arrays(path: Path) -> dict[str, Array]:
    """Reads an .npz file, or an .npy file as an array without a name."""
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        if path.suffix == ".npy":
            return {"": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except Exception as error:  # numpy answers damaged files with nearly anything
        why = one_line(str(error))
        pickled = "allow_pickle" in why or "Python objects" in why
        raise DataError(f"{path} cannot be read: {'it holds Python objects' if pickled else why[:200]}") from None


def _read_csv(path: Path, record: InputRecord, columns: Sequence[str]) -> Batch:
    """Reads rows of a table by the names of their columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [*csv.DictReader(file, strict=True)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or one_line(str(error))}") from None
    if not rows:
        raise DataError(f"{path} has no rows")
    if missing := [name for name in columns if name not in rows[0]]:
        raise DataError(f"{path}: column {missing[0]!r} is missing: the model needs {', '.join(columns)}")
    numbers = []
    for place, row in enumerate(rows, start=1):
        for name in columns:
            try:
                numbers.append(float(row[name]))
            except (TypeError, ValueError):
                cell = one_line(str(row[name] or ""))[:20]
                raise DataError(f"{path}: column {name!r} has {cell!r} in row {place}: write a number") from None
    array = np.array(numbers, record.type).reshape(len(rows), len(columns))
    return Batch({record.name: array}, [f"{path.name}[{place}]" for place in range(len(rows))])


def _list_images(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGES)
    if not files:
        raise DataError(f"{folder} contains no {', '.join(IMAGES)} image")
    return files


def _read_image(path: Path, record: InputRecord) -> Array:
    if record.type != "uint8" or len(record.shape) != 3 or record.shape[0] not in MODES:
        raise DataError(f"{path}: the model takes {record.type} of shape {record.shape}: give an .npy file")
    if path.suffix.lower() not in IMAGES:
        raise DataError(f"{path} is not one of {', '.join(IMAGES)}, .npy, .npz or a folder")
    try:
        from PIL import Image
    except ImportError:
        raise DataError("images need Pillow: pip install 'fedhen[images]'") from None
    channels, height, width = record.shape
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            if max(image.size) <= LARGEST_SIDE and image.size == (width, height):
                pixels = np.asarray(image.convert(MODES[channels]), np.uint8)
                return pixels.reshape(height, width, channels).transpose(2, 0, 1)
            size = image.size
    except Exception as error:  # decoders answer damaged files with nearly anything
        reason = getattr(error, "strerror", None) or one_line(str(error))[:200]
        raise DataError(f"{path} cannot be read: {reason}") from None
    raise DataError(f"{path} is {size[0]}×{size[1]} pixels, and the model takes {width}×{height}: resize it")


def _read_texts(given: Sequence[str], record: InputRecord, classes: Sequence[str]) -> Batch:
    codes, context = {name: place for place, name in enumerate(classes)}, record.shape[0]
    rows, lengths = [], []
    for each in given:
        text = _read_text(each)
        if unknown := next((c for c in text if c not in codes), ""):
            raise DataError(f"the model does not know the character {unknown!r}: it was not in the training text")
        if not text:
            raise DataError("the text is empty")
        # What follows the text does not matter: no position sees those after it.
        row = [codes[character] for character in text[-context:]]
        lengths.append(len(row))
        rows.append(row + [0] * (context - len(row)))
    return Batch({record.name: np.array(rows, np.int64)}, [repr(text[-20:]) for text in given], lengths)
