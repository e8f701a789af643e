"""Checksums of tensors and of whole data sets, by which runs know whether they have the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedhen.data.dataset import Data
from fedhen.data.inputs import list_tensors

EXAMPLES = ("training inputs", "training labels", "test inputs", "test labels")


def compute_digest(tensors: Iterable[Tensor]) -> str:
    """Returns a checksum of shapes, types and bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        # Tensors made of empty arrays have no strides that can be viewed as bytes.
        if tensor.numel():
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def digest_examples(data: Data) -> dict[str, str]:
    """Returns the checksums of inputs and labels, for training and for testing."""
    parts = (list_tensors(data.x), [data.y], list_tensors(data.x_test), [data.y_test])
    return dict(zip(EXAMPLES, map(compute_digest, parts), strict=True))


def name_data_set(data: Data, known: Mapping[str, str] | None = None) -> str:
    """Returns one checksum of the data set, which is the same however its examples are split over devices.

    If a seed has drawn the examples from a larger data set, it is the checksum of that one: the same for all seeds.
    `known` are the checksums of `digest_examples`, if they were computed before, and maybe others.
    """
    if data.source:
        return data.source
    known = known or digest_examples(data)
    return digest_text("\n".join(known[name] for name in EXAMPLES))


def digest_text(text: str) -> str:
    """Returns the checksum of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
