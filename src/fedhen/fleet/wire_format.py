"""The wire format: how messages between server and nodes are coded as Flower records, and validated when received.

Weights travel in the safetensors format, so nothing is unpickled. The receiver of weights expects certain names, types
and shapes, and compares all of them before it builds a tensor.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors import SafetensorError, deserialize
from safetensors.torch import save
from torch import Tensor

from fedhen.algorithm.failures import MAX_ERROR_LENGTH
from fedhen.errors import one_line
from fedhen.fileio.untrusted import PARSE_ERRORS, check_int, check_number, check_text, describe_error
from fedhen.params import SAFETENSORS_TYPES, Weights, count_bytes, is_finite
from fedhen.version import VERSION

FORMAT = 4
WEIGHTS, SAFETENSORS, CONFIG_REQUEST = "weights", "safetensors", "config-request"
LONGEST_HEADER = 2**20
"""Maximum number of bytes of the names, shapes and types of a model."""
LONGEST_NAME, MOST_SAMPLES = 100, 2**40

T = TypeVar("T", bound="Identity | Order")


class Malformed(ValueError):
    """A message that does not follow the protocol. Its text says why, in one line."""


@dataclass(frozen=True)
class Identity:
    """A node's description of itself. Raises TypeError or ValueError if a field is wrong, as `Order` does."""

    tier: str
    samples: int
    name: str
    """Identifies the device if it comes back under another node id."""
    place: int = -1
    """The device number that the node asks for, -1 for any."""

    def __post_init__(self) -> None:
        for text in (self.tier, self.name):
            check_text(text)
        check_int(self.samples, 1)
        check_int(self.place, -1)


@dataclass(frozen=True)
class Order:
    """A node's work for a round. It names no other device, and nothing from which other rounds could be computed."""

    run: str
    """The run whose memory the device uses."""
    round: int
    tier: str
    memory: int
    """The round after which the device's memory is to be used: the last one that the server merged. 0: none yet."""
    inputs: tuple[int, ...]
    classes: int
    config_digest: str
    """SHA-256 of the run's configuration as nodes get it, in hexadecimal."""
    key: str = field(repr=False)
    """The key of this device's random streams in this round, in hexadecimal."""
    initial_key: str = field(repr=False)
    """What the initial weights follow from, in hexadecimal. It is the same for all devices."""
    omega: float = 1.0
    """The device's share of the data. It is sent only if the local variant needs it."""
    fixed_digest: str = ""
    """SHA-256 of the weights that no device trains, as they are packed, in hexadecimal; empty if there are none."""
    config_text: str = ""
    """The configuration itself. Only the first order to a node carries it and these weights; the node stores both."""

    def __post_init__(self) -> None:
        for text in (self.run, self.tier, self.config_digest, self.config_text):
            check_text(text)
        for number, least in ((self.round, 1), (self.memory, 0), (self.classes, 1)):
            check_int(number, least)
        for size in self.inputs:
            check_int(size, 1)
        check_number(self.omega)
        fixed_digest = check_text(self.fixed_digest) or self.config_digest
        for text in (self.config_digest, fixed_digest, self.key, self.initial_key):
            check_hexadecimal(text)


@dataclass(frozen=True)
class Answer:
    """A node's result of a round."""

    weights: Weights
    """Its weights, or the tensors that code them."""
    change: Weights
    """The change of the device's memory; empty if the server can compute it."""
    loss: float = math.nan
    """NaN unless a setting needs it: it is then not sent."""
    present: tuple[int, ...] = ()
    """The classes that the device holds; empty unless the server averages by them."""


def check_hexadecimal(text: object) -> str:
    """Returns an untrusted key or digest. Raises one of PARSE_ERRORS if it is none."""
    if not re.fullmatch(r"[0-9a-f]{64}", check_text(text)):
        raise ValueError("a key or digest is not 32 bytes in hexadecimal")
    return str(text)


def read_fields(kind: type[T], values: Mapping[str, Any]) -> T:
    """Builds a checked record from untrusted values. Raises one of PARSE_ERRORS if a field is missing or wrong."""
    return kind(**{field.name: values[field.name] for field in fields(kind)})


def digest_of(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def pack_question(config_text: str) -> RecordDict:
    """Builds the question for a node's identity. The number of its examples may depend on the configuration."""
    return RecordDict({"question": ConfigRecord({"format": FORMAT, "config": config_text})})


def read_question(content: RecordDict) -> str:
    """Returns the run's configuration as TOML."""
    try:
        return check_text(read_table(content, "question")["config"])
    except PARSE_ERRORS as error:
        raise Malformed(f"the server's question cannot be read: {describe_error(error)}") from None


def pack_identity(identity: Identity) -> RecordDict:
    return RecordDict({"node": ConfigRecord({"format": FORMAT, **vars(identity)}), "versions": pack_versions()})


def pack_problem(error: str) -> RecordDict:
    """Builds the reply of a node that cannot say what it is, with the reason."""
    return RecordDict({"failure": ConfigRecord({"error": error}), "versions": pack_versions()})


def pack_versions() -> ConfigRecord:
    return ConfigRecord({"format": FORMAT, "fedhen": VERSION, "torch": str(torch.__version__)})


def read_versions(content: RecordDict | str) -> Mapping[str, str]:
    """Returns the versions of fedhen, torch and the protocol that a node reports; empty if it reports none."""
    found = content.get("versions") if not isinstance(content, str) else None
    if not isinstance(found, ConfigRecord):
        return {}
    return {name: one_line(str(found[name]))[:LONGEST_NAME] for name in ("fedhen", "torch", "format") if name in found}


def read_identity(content: RecordDict) -> Identity:
    if (other := read_versions(content).get("format", str(FORMAT))) != str(FORMAT):
        raise Malformed(f"it speaks protocol {other}, and the server {FORMAT}: install fedhen {VERSION} there")
    check_failure(content)
    values = read_table(content, "node")
    try:
        identity = read_fields(Identity, values)
    except PARSE_ERRORS as error:
        raise Malformed(f"its identity cannot be read: {describe_error(error)}") from None
    if identity.samples > MOST_SAMPLES or max(len(identity.tier), len(identity.name)) > LONGEST_NAME:
        raise Malformed("its identity is out of range")
    return replace(identity, tier=one_line(identity.tier), name=one_line(identity.name))


def pack_order(
    order: Order, model: ArrayRecord, mean: ArrayRecord | None = None, fixed: ArrayRecord | None = None
) -> RecordDict:
    """Builds a node's order. The records of weights may be shared by all nodes of a tier."""
    values = {**vars(order), "format": FORMAT, "inputs": list(order.inputs)}
    if order.omega == 1.0:
        del values["omega"]
    parts: dict[str, ArrayRecord | ConfigRecord] = {"order": ConfigRecord(values), "model": model}
    more = {name: record for name, record in (("mean", mean), ("fixed", fixed)) if record is not None}
    return RecordDict({**parts, **more})


def read_order(content: RecordDict) -> Order:
    values = read_table(content, "order")
    try:
        return read_fields(Order, {"omega": 1.0, **values, "inputs": tuple(values["inputs"])})
    except PARSE_ERRORS as error:
        raise Malformed(f"the server's order cannot be read: {describe_error(error)}") from None


def pack_config_request() -> RecordDict:
    """Builds the reply of a node that does not have the configuration of an order."""
    return RecordDict({CONFIG_REQUEST: ConfigRecord({"format": FORMAT})})


def is_config_request(content: RecordDict | str) -> bool:
    return not isinstance(content, str) and [*content] == [CONFIG_REQUEST]


def pack_answer(answer: Answer) -> RecordDict:
    values: dict[str, Any] = {"format": FORMAT}
    if not math.isnan(answer.loss):
        values["loss"] = answer.loss
    if answer.present:
        values["present"] = list(answer.present)
    update, model = ConfigRecord(values), pack_weights(answer.weights)
    parts: dict[str, ArrayRecord | ConfigRecord] = {"update": update, "model": model}
    return RecordDict({**parts, **({"change": pack_weights(answer.change)} if answer.change else {})})


def pack_failure(error: str) -> RecordDict:
    """Builds the reply of a node that could not train."""
    return RecordDict({"failure": ConfigRecord({"error": error})})


def check_failure(content: RecordDict) -> None:
    """Raises `Malformed` with a node's reason if it could not do what it was asked."""
    if "failure" in content:
        failure = content["failure"]
        error = failure.get("error") if isinstance(failure, ConfigRecord) else None
        raise Malformed(one_line(str(error))[:MAX_ERROR_LENGTH] or "it could not train")


def read_answer(content: RecordDict, model: Mapping[str, Tensor], change: Mapping[str, Tensor], classes: int) -> Answer:
    """Reads a node's answer. Raises `Malformed` unless it has exactly the names, shapes and types that were sent."""
    check_failure(content)
    needed, known = {"update", "model"}, {"update", "model", *(["change"] if change else [])}
    if odd := sorted((needed - content.keys()) | (content.keys() - known)):
        problem = "missing" if odd[0] in needed else "unexpected"
        raise Malformed(f"record {one_line(odd[0])[:LONGEST_NAME]!r} is {problem}")
    update = read_table(content, "update")
    loss, present = update.get("loss", math.nan), update.get("present", [])
    if not isinstance(loss, float) or not isinstance(present, list):
        raise Malformed("its loss or its classes cannot be read")
    if not all(type(label) is int and 0 <= label < classes for label in present):
        raise Malformed("it names classes that do not exist")
    weights = unpack_weights(content["model"], model)
    if not is_finite(weights):
        # The server will drop this update. The device's memory does not change then, and is not sent.
        change = {}
    remembered = unpack_weights(content.get("change"), change) if change else {}
    return Answer(weights, remembered, loss if math.isfinite(loss) else math.nan, tuple(sorted({*present})))


def pack_weights(weights: Mapping[str, Tensor]) -> ArrayRecord:
    """Packs weights into one Flower array, in the safetensors format: every array costs several requests."""
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
    return ArrayRecord({WEIGHTS: Array("uint8", (len(content),), SAFETENSORS, content)})


def content_of(record: object) -> bytes:
    """Returns the bytes of packed weights. Raises `Malformed` if there are none."""
    if not isinstance(record, ArrayRecord) or [*record] != [WEIGHTS] or record[WEIGHTS].stype != SAFETENSORS:
        raise Malformed("its weights are missing")
    return record[WEIGHTS].data


def unpack_weights(record: object, like: Mapping[str, Tensor]) -> Weights:
    """Reads weights. Raises `Malformed` unless they have exactly the names, shapes and types of `like`."""
    return read_weights(content_of(record), like)


def read_weights(data: bytes, like: Mapping[str, Tensor]) -> Weights:
    """Reads weights from the bytes that they are packed into, as `unpack_weights` does."""
    expected = count_bytes(like)
    if not expected <= len(data) <= expected + LONGEST_HEADER:
        raise Malformed(f"its weights are {len(data)} bytes instead of {expected}")
    try:
        found = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise Malformed(f"its weights cannot be read: {one_line(str(error))[:LONGEST_NAME]}") from None
    if odd := sorted(found.keys() ^ like.keys()):
        name = one_line(odd[0])[:LONGEST_NAME]
        raise Malformed(f"weight {name!r} is {'missing' if odd[0] in like else 'unexpected'}")
    for name, tensor in like.items():
        if found[name]["dtype"] != SAFETENSORS_TYPES[tensor.dtype]:
            raise Malformed(f"weight {name!r} has another type than the one that was sent")
        if (shape := tuple(found[name]["shape"])) != tuple(tensor.shape):
            raise Malformed(f"weight {name!r} has shape {str(shape)[:60]} instead of {tuple(tensor.shape)}")
    # In the order of the model: the order on the wire is arbitrary.
    return {name: _tensor(found[name]["data"], tensor) for name, tensor in like.items()}


def _tensor(data: bytearray, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.zeros_like(like)
    # A copy that nothing else refers to, since weights are written to.
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape).to(like.device)


def read_table(content: RecordDict, name: str) -> Mapping[str, Any]:
    """Returns a record of a message. Raises `Malformed` if it is missing or of another protocol format."""
    found = content.get(name)
    if not isinstance(found, ConfigRecord):
        raise Malformed(f"record {name!r} is missing")
    if found.get("format") != FORMAT:
        raise Malformed("it uses another protocol format: install the same version of fedhen on server and nodes")
    return found
