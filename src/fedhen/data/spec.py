"""What raw inputs and targets are, and how raw inputs become what a network is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from fedhen.data.inputs import Inputs, list_tensors
from fedhen.errors import DataError
from fedhen.fileio import untrusted

DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
LARGEST_SIDE = 1 << 16
"""The longest side of images and sequences that a file may declare."""
MOST_INPUTS, MOST_DIMENSIONS, MOST_NUMBERS = 1 << 12, 64, 1 << 31
CHANNELS = (1, 3)
Kind = Literal["pixels", "tokens", "rows", "numbers"]


@dataclass(frozen=True)
class Normalisation:
    """(x − mean) / std for each channel or column, in units of the stored values."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises a batch (n, channels, ...)."""
        mean, std = _tensors(self, x.dim(), x.device)
        return (x.float() - mean) / std

    def check(self, shape: Sequence[int]) -> None:
        """Raises a DataError if inputs of this shape cannot be normalised."""
        channels = shape[0] if shape else 0
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, channels) or not channels:
            found = f"{len(self.mean)} means and {len(self.std)} deviations"
            raise DataError(f"normalisation has {found}, and inputs have shape {tuple(shape)}: give one a channel")
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        if not bool((mean.isfinite() & std.isfinite() & (std > 0)).all()):
            raise DataError("normalisation needs finite means, and finite deviations above 0")


@lru_cache(maxsize=64)
def _tensors(values: Normalisation, dimensions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns mean and deviation in the shape of a batch of that many dimensions. Made once, not for every batch."""
    shape = (1, -1, *[1] * (dimensions - 2))
    mean, std = (torch.tensor(numbers, device=device).view(shape) for numbers in (values.mean, values.std))
    return mean, std


@dataclass(frozen=True)
class InputSpec:
    """One tensor of a raw input, and how it becomes what the network is given.

    Name, type and shape may be left out: `FederatedData.describe` fills them in from the tensors.
    """

    name: str = ""
    """The argument that models are given it as; empty if it is given by its position."""
    dtype: str = ""
    """The type of raw values, like uint8, int64 or float32."""
    shape: tuple[int, ...] = ()
    """Of one example: (channels, height, width), (columns,), (positions,)."""
    normalisation: Normalisation | None = None
    """What is done to raw numbers. None: the network is given them as they are."""
    highest: int = 255
    """The largest value of a pixel."""
    resized: bool = False
    """Whether images of another size are resized, bilinearly. If not, they are refused."""
    columns: tuple[str, ...] = ()
    """The names of the numbers in a row of a table."""
    alphabet: str = ""
    """The characters of texts, in the order of their token ids."""
    padding: int | None = None
    """The token with which short sequences are filled up at their end. None: they must have their full length."""

    @property
    def kind(self) -> Kind:
        """What raw values are: pixels of images, tokens (or text), rows of a table, or other numbers."""
        if self.dtype == "uint8" and len(self.shape) == 3 and self.shape[0] in CHANNELS:
            return "pixels"
        if self.alphabet or self.padding is not None:
            return "tokens"
        return "rows" if self.columns else "numbers"

    def feed(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a batch as a network with weights of this type is given it."""
        if self.normalisation is not None:
            return self.normalisation(raw).to(dtype)
        return raw.to(dtype) if raw.is_floating_point() else raw

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it, without what does not apply."""
        pixels = {"highest": self.highest, "resized": self.resized} if self.kind == "pixels" else {}
        scale = self.normalisation
        return {
            **({"name": _clean(self.name)} if self.name else {}),
            "dtype": self.dtype,
            "shape": list(self.shape),
            **pixels,
            **({"mean": list(scale.mean), "std": list(scale.std)} if scale else {}),
            **({"columns": list(map(_clean, self.columns))} if self.columns else {}),
            **({"alphabet": self.alphabet} if self.alphabet else {}),
            **({"padding": self.padding} if self.padding is not None else {}),
        }


@dataclass(frozen=True)
class DataSpec:
    """What models are given and predict.

    Args:
        inputs: Each tensor of an input, in order.
        class_names: The names of classes, of labels in multi-label tasks, of tokens in language modelling.
        target: What is predicted, like a column's name.
        unit: The unit of predicted numbers.
    """

    inputs: tuple[InputSpec, ...] = ()
    class_names: tuple[str, ...] = ()
    target: str = ""
    unit: str = ""

    def __post_init__(self) -> None:
        if len({*self.class_names}) < len(self.class_names):
            [(twice, _)] = Counter(self.class_names).most_common(1)
            raise DataError(f"class_names has {twice[:40]!r} twice: give each class another name")

    def complete(self, x: Inputs, normalisation: Normalisation | None) -> DataSpec:
        """Returns it with what follows from the data's tensors."""
        names = list(x) if isinstance(x, Mapping) else [""] * len(list_tensors(x))
        known = [*self.inputs, *[InputSpec()] * len(names)]
        inputs = [
            replace(
                each,
                name=name,
                dtype=each.dtype or str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape[1:]),
                normalisation=each.normalisation or normalisation,
            )
            for each, name, tensor in zip(known, names, list_tensors(x), strict=False)
        ]
        return replace(self, inputs=tuple(inputs))

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it, without what is not known."""
        names = list(map(_clean, self.class_names))
        found = {"class_names": names, "target": _clean(self.target), "unit": _clean(self.unit)}
        return {"inputs": [each.to_dict() for each in self.inputs], **{k: v for k, v in found.items() if v}}


def read_normalisation(given: object) -> Normalisation | None:
    """Makes a normalisation of a pair (mean, std), each a number or one number a channel."""
    if given is None or isinstance(given, Normalisation):
        return given
    try:
        mean, std = (tuple(torch.as_tensor(each).double().reshape(-1).tolist()) for each in given)  # type: ignore[attr-defined]
    except (TypeError, ValueError, RuntimeError):
        raise DataError("normalisation must be (mean, std), each a number or one number a channel") from None
    return Normalisation(mean, std)


def read_data_spec(values: Any) -> DataSpec:
    """Reads what `DataSpec.to_dict` returned. Raises one of PARSE_ERRORS for anything else."""
    found = untrusted.check_mapping(values)
    inputs = tuple(_read_input(each) for each in _list(found["inputs"], MOST_INPUTS))
    names = [each.name for each in inputs if each.name]
    if not inputs or len({*names}) < len(names) or len(names) not in (0, len(inputs)):
        raise ValueError("its inputs have no names to tell them apart")
    target, unit = (_text(found.get(key, "")) for key in ("target", "unit"))
    return DataSpec(inputs, _texts(found.get("class_names", [])), target, unit)


def _clean(text: str) -> str:
    """Returns text without halves of characters, which names of folders may have and nothing can print."""
    return text.encode(errors="replace").decode()


def _read_input(values: Any) -> InputSpec:
    found = untrusted.check_mapping(values)
    dtype, padding = _text(found["dtype"]), found.get("padding")
    if dtype not in DTYPES:
        raise ValueError(f"{dtype[:40]!r} is not a type of numbers")
    resized = found.get("resized", False)
    if not isinstance(resized, bool):
        raise TypeError("resized is neither true nor false")
    spec = InputSpec(
        name=_text(found.get("name", "")),
        dtype=dtype,
        shape=tuple(_whole(side, 1, MOST_NUMBERS) for side in _list(found["shape"], MOST_DIMENSIONS)),
        normalisation=_read_scale(found) if "mean" in found or "std" in found else None,
        highest=_whole(found.get("highest", 255), 1, 255),
        resized=resized,
        columns=_texts(found.get("columns", [])),
        alphabet=_text(found.get("alphabet", "")),
        padding=None if padding is None else _whole(padding, 0, MOST_NUMBERS),
    )
    if spec.normalisation is not None:
        spec.normalisation.check(spec.shape)
    if spec.columns and spec.shape != (len(spec.columns),):
        raise ValueError(f"{len(spec.columns)} columns do not fit inputs of shape {spec.shape}")
    if spec.kind in ("pixels", "tokens") and max(spec.shape, default=0) > LARGEST_SIDE:
        raise ValueError(f"inputs of shape {spec.shape} are too large")
    if len({*spec.alphabet}) < len(spec.alphabet):
        raise ValueError("a character is twice in its alphabet")
    if spec.kind == "tokens" and (len(spec.shape) != 1 or DTYPES[dtype].is_floating_point):
        raise ValueError(f"tokens of shape {spec.shape} and type {dtype} are not sequences of whole numbers")
    return spec


def _read_scale(found: Mapping[str, Any]) -> Normalisation:
    mean, std = (
        tuple(float(untrusted.check_number(n, -untrusted.MOST)) for n in _list(found[key], MOST_NUMBERS))
        for key in ("mean", "std")
    )
    return Normalisation(mean, std)


def _list(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise TypeError(f"{str(value)[:40]!r} is not a list of at most {most}")
    return value


def _whole(value: Any, least: int, most: int) -> int:
    return int(untrusted.check_number(untrusted.check_int(value), least, most))


def _text(value: Any) -> str:
    # This raises for halves of characters, which JSON can hold.
    return untrusted.check_text(value).encode().decode()


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(map(_text, _list(values, MOST_NUMBERS)))
