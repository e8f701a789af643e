"""Looks into ONNX files without a package for them: whether they refer to data in other files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
EXTERNAL_DATA, DATA_LOCATION = 13, 14
"""Fields of a tensor."""
DEEPEST = 64
"""Graphs inside graphs, and more than any cascade has."""
PARTS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
"""Message -> the fields in which it has others that may hold tensors, as onnx.proto numbers them."""


def has_external_data(model: bytes) -> bool:
    """Returns whether a tensor of an ONNX model lies in another file. Raises ValueError if the model is malformed."""
    return _looks_outside(memoryview(model), "model", 0)


def _looks_outside(message: memoryview, kind: str, depth: int) -> bool:
    if depth > DEEPEST:
        raise ValueError("it is nested too deeply")
    for field, value in _read_fields(message):
        if kind == "tensor" and (field == EXTERNAL_DATA or (field == DATA_LOCATION and value)):
            return True
        part = PARTS[kind].get(field)
        if part is not None and isinstance(value, memoryview) and _looks_outside(value, part, depth + 1):
            return True
    return False


def _read_fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    place = 0
    while place < len(message):
        key, place = _read_varint(message, place)
        field, wire = key >> 3, key & 7
        if wire == VARINT:
            number, place = _read_varint(message, place)
            yield field, number
            continue
        if wire == BYTES:
            size, place = _read_varint(message, place)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
        else:
            raise ValueError("it is no ONNX file")
        if place + size > len(message):
            raise ValueError("it is torn")
        yield field, message[place : place + size]
        place += size


def _read_varint(message: memoryview, place: int) -> tuple[int, int]:
    found = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            raise ValueError("it is torn")
        byte = message[place]
        place += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, place
    raise ValueError("it is no ONNX file")
