"""Reads the columns of a table: of a DataFrame, a CSV or Parquet file, a `datasets.Dataset` or a mapping."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhen.data.pixels import Array
from fedhen.errors import DataError, FedhenError, one_line
from fedhen.hardware.memory import free_memory

Columns = dict[str, Array]
SUFFIXES = (".csv", ".parquet", ".pq")
INSTALL = "pip install 'fedhen[tables]'"
LESS = "keep fewer rows or columns, or save the numbers in an .npz file"
SAMPLE = 1 << 20
"""The bytes of a CSV file by which its memory is estimated."""
BYTES_OF_TEXT = 80
"""What a cell of text takes: an object of Python, and its places in two lists."""


def read_columns(table: object) -> Columns:
    """Returns the columns of any table by name, in order."""
    if isinstance(table, str | PathLike):
        found = _read_file(Path(table))
    elif hasattr(table, "columns") and hasattr(table, "iloc"):
        _check_names(list(map(str, table.columns)))
        found = {str(name): table[name].to_numpy() for name in table.columns}  # type: ignore[index]
    elif hasattr(table, "column_names"):
        found = {str(name): table[name] for name in table.column_names}  # type: ignore[index]
    elif isinstance(table, Mapping):
        found = {str(name): column for name, column in table.items()}
    else:
        kinds = "a DataFrame, a path, a datasets.Dataset or a mapping of columns"
        raise DataError(f"it is {type(table).__name__}: pass {kinds}")
    columns = {name: _to_array(name, column) for name, column in found.items()}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"its columns have unequal lengths: {', '.join(f'{n!r} has {k}' for n, k in lengths.items())}")
    if not columns or not next(iter(lengths.values())):
        raise DataError("it has no rows")
    return columns


def _to_array(name: str, column: Any) -> Array:
    try:
        found = np.asarray(column.detach().cpu() if isinstance(column, torch.Tensor) else column)
        if found.dtype.kind == "O" and found.ndim and len(found) and isinstance(found[0], list | tuple | np.ndarray):
            found = np.stack([np.asarray(each) for each in found])
    except ValueError:
        raise DataError(f"column {name!r} has rows of unequal lengths: pad them to one length") from None
    except (TypeError, RuntimeError) as error:
        raise DataError(f"column {name!r} is not an array: {one_line(str(error))[:80]}") from None
    if not found.ndim:
        raise DataError(f"column {name!r} is a single value: pass an array")
    # numpy's text is as wide as its widest cell, and pandas has types of its own: Python's strings serve both.
    return found if found.dtype.kind in "fiub" else found.astype(object)


def _check_names(names: Sequence[str]) -> None:
    if repeated := [name for k, name in enumerate(names) if name in names[:k]]:
        raise DataError(f"it has two columns {repeated[0]!r}: rename one of them")


def _read_file(path: Path) -> Mapping[str, Any]:
    if path.suffix not in SUFFIXES:
        raise DataError(f"it is not a table: name a {', '.join(SUFFIXES)} file")
    try:
        return _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
    except MemoryError:
        raise DataError(f"it does not fit the memory: {LESS}") from None
    except OSError as error:
        raise DataError(f"it cannot be read: {error.strerror or one_line(str(error))}") from None


def check_memory(needed: float) -> None:
    """Raises a DataError if a table that takes about `needed` bytes would take more than half of the free memory."""
    free = free_memory(torch.device("cpu"))
    if needed > free / 2:
        raise DataError(f"it needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free: {LESS}")


def estimate_csv(path: Path) -> float:
    """Returns about how many bytes a CSV file needs in memory, by the number of cells at its start."""
    with path.open("rb") as file:
        start = file.read(SAMPLE)
    cells = start.count(b",") + start.count(b"\n")
    return float(path.stat().st_size * (1 + BYTES_OF_TEXT * cells / max(1, len(start))))


def estimate_parquet(path: Path) -> float:
    """Returns about how many bytes a Parquet file needs in memory, by what it says of its columns."""
    import pyarrow.parquet

    about = pyarrow.parquet.read_metadata(path)
    groups = (about.row_group(place) for place in range(about.num_row_groups))
    chunks = [group.column(place) for group in groups for place in range(group.num_columns)]
    # Arrow's columns, and what pandas makes of them. Text that repeats is stored once, and not read so.
    each = {"BYTE_ARRAY": BYTES_OF_TEXT}
    return float(sum(2 * c.total_uncompressed_size + c.num_values * each.get(c.physical_type, 8) for c in chunks))


def _read_csv(path: Path) -> Mapping[str, Any]:
    check_memory(estimate_csv(path))
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            names = next(reader, [])
            rows = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"it is not a CSV file in UTF-8: {one_line(str(error))}") from None
    _check_names(names)
    for line, row in rows:
        if len(row) != len(names):
            raise DataError(f"line {line} has {len(row)} cells, and the first line names {len(names)} columns")
    texts = (np.array([row[k] for _, row in rows], object) for k in range(len(names)))
    return dict(zip(names, texts, strict=True))


def _read_parquet(path: Path) -> Mapping[str, Any]:
    try:
        import pandas
        import pyarrow
    except ImportError:
        raise DataError(f"a Parquet file needs pandas and pyarrow: {INSTALL}") from None
    try:
        check_memory(estimate_parquet(path))
        frame = pandas.read_parquet(path)
    except FedhenError:
        raise
    except (pyarrow.ArrowException, ValueError) as error:
        raise DataError(f"it is not a Parquet file, or is damaged: {one_line(str(error))}") from None
    return {str(name): frame[name].to_numpy() for name in frame.columns}
