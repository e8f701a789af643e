"""Reads raw inputs for a trained model: images, texts, rows of a table, arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhen.data.columns import read_columns
from fedhen.data.image_folder import check_depth, import_pillow, open_image, read_pixels
from fedhen.data.inputs import Inputs, read_tensor, take
from fedhen.data.pixels import Array
from fedhen.data.spec import DTYPES, DataSpec, InputSpec, Kind
from fedhen.data.tables import read_numbers
from fedhen.errors import DataError, FedhenError, one_line


@dataclass(frozen=True)
class RawBatch:
    """Raw inputs that were checked, with a row for each example."""

    spec: DataSpec
    tensors: tuple[Tensor, ...]
    lengths: Tensor | None = None
    """The number of tokens of each sequence that are not padding, if there are sequences."""

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, part: slice) -> RawBatch:
        lengths = None if self.lengths is None else self.lengths[part]
        return RawBatch(self.spec, take(self.tensors, part), lengths)

    def feed(self, device: torch.device, dtype: torch.dtype) -> Inputs:
        """Returns what a network on this device, with weights of this type, is given."""
        fed = [spec.feed(tensor.to(device), dtype) for spec, tensor in zip(self.spec.inputs, self.tensors, strict=True)]
        names = [spec.name for spec in self.spec.inputs]
        return dict(zip(names, fed, strict=True)) if all(names) else tuple(fed)


def read_raw(spec: DataSpec, raw: Any) -> RawBatch:
    """Reads one raw input or several. Raises a DataError that says what does not fit."""
    if isinstance(raw, list | tuple | str) and not raw:
        raise DataError("there are no inputs: pass at least one")
    try:
        return _read_raw(spec, raw)
    except FedhenError:
        raise
    except Exception as error:  # It may be an object of any library.
        raise DataError(f"the inputs cannot be read: {one_line(f'{type(error).__name__}: {error}')[:200]}") from None


def _read_raw(spec: DataSpec, raw: Any) -> RawBatch:
    single = len(spec.inputs) == 1 and not spec.inputs[0].name
    parts = [raw] if single else _find_parts(spec.inputs, raw)
    found = [READERS[each.kind](each, part) for each, part in zip(spec.inputs, parts, strict=True)]
    tensors = tuple(tensor for tensor, _ in found)
    if len({len(tensor) for tensor in tensors}) > 1:
        each = ", ".join(str(len(tensor)) for tensor in tensors)
        raise DataError(f"the inputs have unequal numbers of examples: {each}")
    if not len(tensors[0]):
        raise DataError("there are no inputs: pass at least one")
    return RawBatch(spec, tensors, next((lengths for _, lengths in found if lengths is not None), None))


Read = tuple[Tensor, Tensor | None]
"""The raw values, with a row for each example, and the lengths of sequences."""


def _find_parts(specs: Sequence[InputSpec], raw: Any) -> list[Any]:
    names = [spec.name for spec in specs]
    if not all(names):
        if not isinstance(raw, tuple) or len(raw) != len(specs):
            raise DataError(f"the model is given {len(specs)} inputs: pass a tuple of them")
        return list(raw)
    found = raw if isinstance(raw, Mapping) else read_columns(raw) if _is_table(raw) else {}
    if missing := [name for name in names if name not in found]:
        raise DataError(f"the input {missing[0]!r} is missing: pass a mapping with {', '.join(names)}")
    return [found[name] for name in names]


def _read_numbers(spec: InputSpec, raw: Any) -> Read:
    values = _read_array(spec, raw)
    if tuple(values.shape) == spec.shape:
        values = values[None]
    if tuple(values.shape[1:]) != spec.shape:
        raise DataError(f"{_label(spec)} has shape {tuple(values.shape)}: one example has shape {spec.shape}")
    wanted, found = DTYPES[spec.dtype], str(values.dtype).removeprefix("torch.")
    if values.is_complex() or (wanted.is_floating_point and found in ("uint8", "bool")):
        raise DataError(
            f"{_label(spec)} is {found}, and the model was trained on {spec.dtype}: prepare it as for training"
        )
    if not wanted.is_floating_point and values.is_floating_point():
        raise DataError(f"{_label(spec)} is {found}, and the model was trained on whole numbers: pass {spec.dtype}")
    converted = values.to(wanted)
    if wanted.is_floating_point and not bool(torch.isfinite(converted).all()):
        raise DataError(f"{_label(spec)} holds NaN or infinity: remove or fill these values")
    if not wanted.is_floating_point and not torch.equal(converted.long(), values.long()):
        raise DataError(f"{_label(spec)} holds {int(values.max())}, which does not fit {spec.dtype}")
    return converted, None


def _read_rows(spec: InputSpec, raw: Any) -> Read:
    """Reads rows of a table: by the names of their columns, or as an array with the columns in order."""
    if isinstance(raw, Sequence) and raw and all(isinstance(row, Mapping) for row in raw):
        if missing := next((name for name in spec.columns for row in raw if name not in row), None):
            raise DataError(f"column {missing!r} is missing in a row: the model needs {', '.join(spec.columns)}")
        raw = {name: [row[name] for row in raw] for name in spec.columns}
    elif isinstance(raw, Mapping) and all(np.ndim(value) == 0 for value in raw.values()):
        raw = {name: [value] for name, value in raw.items()}
    if not isinstance(raw, Mapping) and not _is_table(raw):
        return _read_numbers(spec, raw)
    try:
        columns = read_columns(raw)
        if missing := next((name for name in spec.columns if name not in columns), None):
            raise DataError(f"column {missing!r} is missing: the model needs {', '.join(spec.columns)}")
        rows = [read_numbers(columns[name], name).astype(np.float64) for name in spec.columns]
        return _read_numbers(spec, np.stack(rows, 1))
    except FedhenError as error:
        raise DataError(f"{raw}: {error}" if isinstance(raw, str | PathLike) else str(error)) from None


def _read_tokens(spec: InputSpec, raw: Any) -> Read:
    """Reads texts or token ids. Of a long sequence the last tokens are taken; a short one is filled up at its end."""
    [context] = spec.shape
    places = {character: place for place, character in enumerate(spec.alphabet)}
    sequences = [_encode(each, places)[-context:] for each in _list_sequences(raw)]
    for each in sequences:
        if not each:
            raise DataError("a text is empty: pass at least one character")
        if spec.padding is None and len(each) < context:
            raise DataError(f"a sequence has {len(each)} tokens: the model needs {context}")
    filled = [[*each, *[spec.padding or 0] * (context - len(each))] for each in sequences]
    tokens = torch.tensor(filled, dtype=DTYPES[spec.dtype]).view(-1, context)
    return tokens, torch.tensor([len(each) for each in sequences])


def _list_sequences(raw: Any) -> list[Any]:
    if isinstance(raw, str):
        return [raw]
    items = raw.tolist() if hasattr(raw, "tolist") else raw
    if not isinstance(items, list | tuple):
        raise DataError(f"the input is {type(raw).__name__}: pass a text, token ids, or a list of them")
    return [items] if items and not isinstance(items[0], str) and np.ndim(items[0]) == 0 else list(items)


def _encode(sequence: Any, places: Mapping[str, int]) -> list[int]:
    if isinstance(sequence, str):
        if odd := next((character for character in sequence if character not in places), ""):
            known = "knows no text: pass token ids" if not places else f"does not know the character {odd!r}: remove it"
            raise DataError(f"the model {known}")
        return [places[character] for character in sequence]
    tokens = sequence.tolist() if hasattr(sequence, "tolist") else sequence
    most = len(places) or np.iinfo(np.int64).max
    for token in tokens if isinstance(tokens, list | tuple) else [tokens]:
        if isinstance(token, bool) or not isinstance(token, int):
            raise DataError(f"a token is {type(token).__name__}: token ids must be whole numbers")
        if not 0 <= token < most:
            raise DataError(f"token {token} is out of range: the model knows 0 to {most - 1}")
    return list(tokens)


def _read_images(spec: InputSpec, raw: Any) -> Read:
    """Reads pixels: images of Pillow, paths of PNG and JPEG files, or arrays with the channels first or last."""
    several = list(raw) if isinstance(raw, list | tuple) else [raw]
    if several and all(_is_image(each) for each in several):
        return torch.from_numpy(np.stack([_load_image(spec, each) for each in several])), None
    if several and isinstance(raw, list | tuple) and all(hasattr(each, "shape") for each in several):
        return torch.cat([_order_channels(spec, _read_array(spec, each)) for each in several]), None
    return _order_channels(spec, _read_array(spec, raw)), None


def _order_channels(spec: InputSpec, values: Tensor) -> Tensor:
    """Returns arrays of pixels as bytes of shape (n, channels, height, width)."""
    channels, height, width = spec.shape
    orders: dict[tuple[int, ...], Callable[[Tensor], Tensor]] = {
        (channels, height, width): lambda x: x,
        (height, width, channels): lambda x: x.permute(0, 3, 1, 2),
        **({(height, width): lambda x: x[:, None]} if channels == 1 else {}),
    }
    shape = tuple(values.shape)
    if shape in orders:
        values = values[None]
    elif shape[1:] not in orders:
        raise DataError(f"{_label(spec)} has shape {shape}: an image has shape {' or '.join(map(str, orders))}")
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        kind = str(values.dtype).removeprefix("torch.")
        raise DataError(
            f"{_label(spec)} is {kind}: pass pixels as whole numbers from 0 to {spec.highest}, not normalised"
        )
    if values.numel() and not 0 <= int(values.min()) <= int(values.max()) <= spec.highest:
        found = f"{int(values.min())} to {int(values.max())}"
        raise DataError(f"{_label(spec)} has pixels from {found}: the model's are from 0 to {spec.highest}")
    return orders[tuple(values.shape[1:])](values).to(torch.uint8).contiguous()


def _load_image(spec: InputSpec, image: Any) -> Array:
    if isinstance(image, str | PathLike):
        with open_image(import_pillow(), Path(image)) as opened:
            return _load_image(spec, opened)
    channels, *size = spec.shape
    label = one_line(str(getattr(image, "filename", "") or "the image"))
    check_depth(image, label)
    if image.size != (size[1], size[0]) and not spec.resized:
        found, wanted = (f"{width}×{height}" for width, height in (image.size, size[::-1]))
        raise DataError(f"{label} has {found} pixels, and the model's images {wanted}: resize it")
    pixels = read_pixels(import_pillow(), image, {1: "L", 3: "RGB"}[channels], (size[0], size[1]))
    if int(pixels.max()) > spec.highest:
        raise DataError(f"{label} has pixels up to {int(pixels.max())}: the model's are from 0 to {spec.highest}")
    return pixels


def _is_image(value: Any) -> bool:
    return isinstance(value, str | PathLike) or (hasattr(value, "convert") and hasattr(value, "mode"))


def _is_table(value: Any) -> bool:
    return isinstance(value, str | PathLike) or hasattr(value, "columns") or hasattr(value, "column_names")


def _read_array(spec: InputSpec, raw: Any) -> Tensor:
    if isinstance(raw, list | tuple):
        raw = np.asarray([each.detach().cpu().numpy() if isinstance(each, Tensor) else each for each in raw])
    if isinstance(raw, np.ndarray):
        if raw.dtype.kind not in "fiub":
            raise DataError(f"{_label(spec)} is not an array of numbers of one shape")
        # torch cannot compare the larger types without a sign, and warns of arrays that cannot be written to.
        raw = np.array(raw, np.int64 if raw.dtype.kind == "u" and raw.dtype != np.uint8 else None)
    return read_tensor(raw, "inputs").detach().cpu()


def _label(spec: InputSpec) -> str:
    return f"the input {spec.name!r}" if spec.name else "the input"


READERS: Mapping[Kind, Callable[[InputSpec, Any], Read]] = {
    "pixels": _read_images,
    "tokens": _read_tokens,
    "rows": _read_rows,
    "numbers": _read_numbers,
}
